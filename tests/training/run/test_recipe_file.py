"""Recipe files: what is wrong is named with its file, line or field; hostile files do no harm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import plain, recipe, write_recipe

from jaxllm.common.errors import ConfigError, MissingFileError
from jaxllm.common.validation import from_plain, to_plain
from jaxllm.training.lora import LoraConfig
from jaxllm.training.run import train
from jaxllm.training.run.recipe import Recipe, parse_yaml, read_recipe


def read(path: Path, text: str | bytes, **overrides: Any) -> Recipe:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_recipe(path, overrides)


def test_a_file_is_the_recipe_that_it_says(tmp_path: Path):
    path = write_recipe(tmp_path, lora={"rank": 2, "targets": ["q_proj", "attn.v"]})
    spec = read_recipe(path)
    assert spec == recipe(tmp_path, lora={"rank": 2, "targets": ["q_proj", "attn.v"]})
    assert spec.lora == LoraConfig(rank=2, targets=("q_proj", "attn.v"))
    assert spec.optimizer.learning_rate == 1e-2
    assert spec.evaluation.every is None


def test_a_recipe_survives_json(tmp_path: Path):
    spec = recipe(tmp_path, lora={"rank": 2}, trainable=[], evaluation={"samples": 5})
    assert from_plain(Recipe, json.loads(json.dumps(to_plain(spec)))) == spec


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("max_steps", 7, "max_steps", 7),
        ("optimizer.learning_rate", 1e-3, "optimizer.learning_rate", 1e-3),
        ("optimizer.learning_rate", 1, "optimizer.learning_rate", 1.0),
        ("optimizer.no_decay", ["a", "b"], "optimizer.no_decay", ("a", "b")),
        ("lora.rank", 3, "lora.rank", 3),
        ("lora", None, "lora", None),
        ("model.config.num_hidden_layers", 2, "model.config", {"num_hidden_layers": 2}),
        ("mesh.data", 1, "mesh.data", 1),
        ("ema_decay", None, "ema_decay", None),
        ("optimizer", None, "optimizer.schedule", "constant"),
        ("optimizer.weight_decay", None, "optimizer.weight_decay", None),
        ("batch_size", None, "batch_size", 8),
    ],
)
def test_overrides(tmp_path: Path, name: str, value: Any, field: str, expected: Any):
    actual: Any = read_recipe(write_recipe(tmp_path), {name: value})
    for part in field.split("."):
        actual = getattr(actual, part)
    if isinstance(expected, dict):
        assert expected.items() <= actual.items()
        assert "hidden_size" in actual  # the fields beside it stay
    else:
        assert actual == expected
        assert type(actual) is type(expected)


@pytest.mark.in_ci("text19-value19")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1e-4", 1e-4),
        ("1.5E3", 1500.0),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", ""),
        ("[1, 2]", [1, 2]),
        ("{a: 1}", {"a": 1}),
        ("attn.(q|v)", "attn.(q|v)"),
        ("runs/a: b", {"runs/a": "b"}),
        ("2026-01-02", "2026-01-02"),
        ("2026-13-45", "2026-13-45"),
        ("*.jsonl", "*.jsonl"),
        ("&a b", "b"),
        ("[unclosed", "[unclosed"),
        ("!!python/name:os.system", "!!python/name:os.system"),
        (".inf", ".inf"),
        ("[" * 5000, "[" * 5000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_values_of_the_command_line(text: str, value: Any):
    actual = parse_yaml(text)
    assert actual == value
    assert type(actual) is type(value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_step": 3}, "max_step: unknown; is it max_steps?"),
        ({"optimizer": {"learning_rat": 1}}, "learning_rat: unknown; is it optimizer.learning_rat"),
        ({"zzz": 3}, "zzz: unknown; known: model, data"),
        ({"model": None}, "model: expected"),
        ({"model": "smollm2"}, "model: expected fields, found 'smollm2'; write model.path"),
        ({"data": {"format": "text", "path": 3}}, "data.path: expected"),
        ({"data": {"path": "a"}}, "data.format: missing"),
        ({"data": {"path": "a", "format": "txt"}}, "data.format: expected 'text', "),
        ({"max_steps": "many"}, "max_steps: expected an integer or null, found 'many'"),
        ({"max_steps": True}, "max_steps: expected an integer or null, found True"),
        ({"max_steps": 1.0}, "max_steps: expected an integer or null, found 1.0"),
        ({"max_steps": 0}, "max_steps: expected 1 or more, found 0"),
        ({"batch_size": [4]}, "batch_size: expected an integer"),
        ({"batch_size": 5, "accumulation": 2}, "accumulation: 2 does not divide batch_size, 5"),
        ({"seed": -1}, "seed: expected 0 to 4294967295, found -1"),
        ({"seed": 2**32}, "seed: expected 0 to 4294967295"),
        ({"ema_decay": 1}, "ema_decay: expected 0 to 1"),
        ({"trainable": "attn"}, "trainable: expected a list of strings"),
        ({"trainable": ["("]}, "trainable: '(' is not a regex"),
        ({"trainable": [3]}, "trainable[0]: expected a string, found 3"),
        ({"lora": {"rank": 0}}, "lora.rank: expected an integer from 1 on"),
        ({"lora": {}, "trainable": ["a"]}, "trainable: LoRA trains its adapters"),
        ({"optimizer": {"name": "adam"}}, "optimizer.name: unknown 'adam'; known: adamw"),
        ({"evaluation": {"every": 2}}, "evaluation: has no effect without eval_data"),
        ({"checkpoints": {"metric": "eval_accuracy"}}, "checkpoints.metric, mode: have no effect"),
        ({"checkpoints": {"mode": "least"}}, "checkpoints.mode: expected 'min', 'max'"),
        ({"label_smoothing": 1.0}, "label_smoothing: expected 0 to 1, found 1.0"),
        ({"z_loss": -1e-4}, "z_loss: expected 0 or more, found -0.0001"),
        ({"evaluation": {"samples": 3}}, "samples: have no effect without metrics"),
        ({"mesh": {"data": "all"}}, "mesh.data: expected an integer, found 'all'"),
        ({"wandb": True}, "wandb: expected a string or null, found True"),
        ({"ema_decay": "0,9"}, "ema_decay: expected a number or null, found '0,9'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str):
    path = write_recipe(tmp_path, **changes)
    with pytest.raises(ConfigError) as raised:
        read_recipe(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_a_field_that_is_missing(tmp_path: Path):
    fields = plain(tmp_path)
    del fields["data"]
    with pytest.raises(ConfigError, match=r"r\.yaml: data: missing"):
        read(tmp_path / "r.yaml", yaml.safe_dump(fields))


def test_overrides_are_named_where_they_are_wrong(tmp_path: Path):
    path = write_recipe(tmp_path)
    with pytest.raises(ConfigError, match=r"with --optimizer\.nam.*optimizer\.nam: unknown; is it"):
        read_recipe(path, {"optimizer.nam": "lion"})
    with pytest.raises(ConfigError, match=r"max_steps: expected an integer or null, found"):
        read_recipe(path, {"max_steps.a": 1})


@pytest.mark.in_ci("text20-not YAML: ")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", r"field 'seed' is there twice (line 2)"),
        ("mesh: {data: 1, data: 2}", r"field 'data' is there twice (line 1)"),
        ("seed: 1\nyes: 2\n", r"field True: expected a name (line 2)"),
        ("? [a, b]\n: 1\n", r"expected a name"),
        ("", "expected fields and their values"),
        ("- a\n- b\n", "expected fields and their values"),
        ("seed: [1", "not YAML: "),
        ("seed: 1\n---\nseed: 2\n", "not YAML: "),
        ("a: &x 1\nb: *x\n", "*x: aliases are not read (line 2)"),
        ("mesh: {<<: {data: 1}}", "not YAML: "),
        ("seed: !!python/object/apply:os.system ['touch owned']", "not a value that JSON has"),
        ("seed: !!python/name:os.system", "not a value that JSON has"),
        ("seed: !!int seven", "not YAML: invalid literal"),
        ("seed: !!bool maybe", "not YAML: "),
        ("seed: !!timestamp soon", "not a value that JSON has"),
        ("seed: !!binary aGk=", "not a value that JSON has"),
        ("seed: 2026-02-31", "not a value that JSON has"),
        ("seed: " + "9" * 5000, "not YAML: "),
        ("ema_decay: .nan", "expected a finite number (line 1)"),
        ("ema_decay: 1e999", "expected a finite number (line 1)"),
        ("seed: " + "[" * 20_000, "not YAML: "),
        ("seed: " + "{a: " * 20_000, "not YAML: "),
        ("seed: \x00", "not YAML: "),
        (b"seed: \xff\xfe", "not UTF-8"),
        (b"\xff\xfes\x00e\x00", "not UTF-8"),
        (b"a" * (2**20 + 1), "more than 1048576 bytes"),
    ],
)
def test_hostile_and_broken_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, message: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / "r.yaml", text)
    assert str(raised.value).startswith(f"{tmp_path / 'r.yaml'}: ")
    assert message in str(raised.value)
    assert len(str(raised.value)) < 8000
    assert not (tmp_path / "owned").exists()


def test_nested_yaml_aliases_are_refused_at_once(tmp_path: Path):
    lines = ["l0: &l0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
    started = time.process_time()
    with pytest.raises(ConfigError, match="aliases are not read"):
        read(tmp_path / "r.yaml", "\n".join(lines))
    assert time.process_time() - started < 5


def test_a_file_that_is_not_there(tmp_path: Path):
    (tmp_path / "smollm2_lora.yaml").touch()
    with pytest.raises(MissingFileError, match=r"no such file; is it .*smollm2_lora\.yaml"):
        read_recipe(tmp_path / "smollm2-lora.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path)
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_recipe(Path("/dev/zero"))


def test_a_recipe_is_a_dictionary_of_nested_or_dotted_fields(tmp_path: Path):
    fields: dict[str, Any] = {"model": {"path": "no-model"}, "data.path": "a", "max_steps": 3}
    fields |= {"data.format": "text", "output_dir": str(tmp_path / "run")}
    made = read_recipe({}, fields)
    assert (made.model.path, made.data.path, made.max_steps) == ("no-model", "a", 3)
    with pytest.raises(ConfigError, match="recipe: learning_rate: unknown; known: "):
        train({**fields, "learning_rate": 1.0})
    with pytest.raises(ConfigError, match=r"^recipe: (data|model): missing"):
        train({"max_steps": 3})
    with pytest.raises(MissingFileError):
        train(fields, {"max_steps": 4}, quiet=True)


@pytest.mark.parametrize("section", ["checkpoints", "early_stopping"])
def test_metrics_are_checked_before_model_and_data_are_read(tmp_path: Path, section: str):
    fields: dict[str, Any] = {"model.path": str(tmp_path / "no-model"), "max_steps": 3}
    for name in ("data", "eval_data"):
        fields |= {f"{name}.path": "nowhere.jsonl", f"{name}.format": "text"}
    fields |= {"evaluation": {"every": 1, "metrics": ["bleu"]}, f"{section}.metric": "bleu"}
    fields |= {"output_dir": str(tmp_path / "run")}
    known = "eval_loss, eval_perplexity, eval_accuracy, eval_mse, eval_bleu"
    with pytest.raises(ConfigError, match=f"{section}.metric: unknown metric 'bleu'; use {known}"):
        train(fields)
    assert not (tmp_path / "run").exists()
    mode = {"checkpoints.mode": "max"} if section == "checkpoints" else {}
    with pytest.raises(MissingFileError):
        train({**fields, f"{section}.metric": "eval_bleu", **mode}, quiet=True)
