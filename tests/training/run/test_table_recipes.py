"""Recipes over tables: templates, epochs, a config file, and what is checked before loading."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import recipe

import jaxllm
from jaxllm.common.errors import ConfigError, DataError, RunError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo
from jaxllm.training.data.chat_formats import messages_of
from jaxllm.training.data.pipeline import check_fields, read_examples, rows_of
from jaxllm.training.monitor.report import Curve, svg_chart
from jaxllm.training.run.recipe import Evaluation, ModelSource, read_recipe
from jaxllm.training.run.setup import set_up

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 64,
}
ROWS = 'question,context,answer\n"Where, now?",Here,there\nWho?,,me\nWhat?,x,y\nWhy?,z,because\n'
RECIPE = """
model: {config: tiny/config.json, tokenizer: bytes}
data:
  format: prompt_completion
  path: rows.csv
  templates: {prompt: prompt.jinja, completion: " {{ answer }}"}
optimizer: {learning_rate: 0.01}
batch_size: 2
epochs: 1.5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = tmp_path / "recipes"
    (files / "tiny").mkdir(parents=True)
    (files / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (files / "rows.csv").write_text(ROWS)
    (files / "prompt.jinja").write_text("{{ context or 'no context' }}: {{ question }}\n")
    (files / "recipe.yaml").write_text(RECIPE)
    return files


def test_rows_of_a_table(folder: Path):
    data = read_recipe(folder / "recipe.yaml").data
    rows = rows_of(data)
    assert rows[0] == {
        "question": "Where, now?",
        "context": "Here",
        "answer": "there",
        "prompt": "Here: Where, now?",
        "completion": " there",
    }
    assert rows[1]["prompt"] == "no context: Who?"
    info = ModelInfo(kind="causal", vocab_size=384, context_length=64)
    assert read_examples(data, byte_tokenizer(), info).counts.examples == 4


def test_a_template_in_a_file_by_an_override(folder: Path):
    overrides = {"data.templates.prompt": str(folder / "prompt.jinja")}
    spec = read_recipe(folder / "recipe.yaml", overrides)
    assert spec.data.templates["prompt"].startswith("{{ context or")
    for wrong in (None, ["a"]):
        with pytest.raises(ConfigError, match=r"data\.templates\.prompt"):
            read_recipe(folder / "recipe.yaml", {"data.templates.prompt": wrong})


def test_cells_of_csv_are_texts_for_templates(tmp_path: Path):
    """As in generation; messages are read as JSON by the format that needs them."""
    cell = '[{"role": "user", "content": "Hi"}]'
    (tmp_path / "rows.csv").write_text('text,b\n"{}",x\n'.format(cell.replace('"', '""')))
    data = DataConfig(format="text", path=str(tmp_path / "rows.csv"))
    assert rows_of(replace(data, templates={"text": "{{ text }}"}))[0]["text"] == cell
    assert messages_of({"messages": cell}, "messages") == json.loads(cell)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.csv", "text,text\na,b\n", "a.csv: the column 'text' is there twice"),
        ("a.csv", "text,b\n", "a.csv: has no rows"),
        ("a.csv", "text,b\na,b\nc\n", r"^[^:]*a.csv:3: has 1 cells, but the header 2$"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "a.jsonl:2 has no field 'text'; .*'txt'"),
    ],
)
def test_wrong_rows_are_found_before_loading(tmp_path: Path, name: str, content: str, why: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=why):
        check_fields(DataConfig(format="text", path=str(tmp_path / name)))


@pytest.mark.ci
def test_epochs_and_a_config_file(folder: Path):
    overrides = {"output_dir": str(folder / "run")}
    result = jaxllm.train(folder / "recipe.yaml", overrides, quiet=True)
    assert result.step == 3  # 1.5 epochs of 2 batches
    assert result.model.config.hidden_size == 32
    longer = jaxllm.train(
        folder / "recipe.yaml", {**overrides, "epochs": 2.5}, resume=True, quiet=True
    )
    assert longer.step == 5
    with pytest.raises(RunError, match="is at step 5, beyond its last one, 2"):
        jaxllm.train(folder / "recipe.yaml", {**overrides, "max_steps": 2}, resume=True, quiet=True)
    (folder / "prompt.jinja").write_text("{{ question }}")
    with pytest.raises(RunError, match=r"data\.templates"):
        jaxllm.train(folder / "recipe.yaml", {**overrides, "epochs": 4}, resume=True, quiet=True)


@pytest.mark.ci
def test_answers_to_templated_prompts(folder: Path):
    """An evaluation that generates reads the same rows as training."""
    spec = read_recipe(folder / "recipe.yaml", {"output_dir": str(folder / "run"), "epochs": 0.5})
    evaluation = Evaluation(metrics=("exact_match",), fields={"max_new_tokens": 2})
    result = jaxllm.train(replace(spec, eval_data=spec.data, evaluation=evaluation), quiet=True)
    assert result.metrics["eval_exact_match"] == 0
    samples = json.loads((folder / "run" / "samples_after.json").read_text())
    assert samples[0]["prompt"] == "Here: Where, now?"


def test_epochs_and_steps(folder: Path):
    spec = read_recipe(folder / "recipe.yaml", {"max_steps": 7})
    assert (spec.max_steps, spec.epochs, spec.last_step(100)) == (7, None, 7)
    spec = read_recipe(folder / "recipe.yaml", {"epochs": 0.25})
    assert [spec.last_step(steps) for steps in (100, 2, 10)] == [25, 1, 3]
    assert spec.last_step(10, rules=1) == 2
    assert replace(spec, epochs=2.5).last_step(5) == 13  # as transformers' Trainer
    assert replace(spec, epochs=None).last_step(5) == 1000
    with pytest.raises(ConfigError, match="epochs cannot be combined with max_steps"):
        replace(spec, max_steps=3)
    with pytest.raises(ConfigError, match="epochs: expected more than 0, found 0"):
        replace(spec, epochs=0.0)


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        (
            {"templates": {"prompt": "{{ qestion }}", "completion": "{{ answer }}"}},
            DataError,
            r"templates\.prompt: no column 'qestion'; the nearest is 'question'",
        ),
        (
            {"templates": {}, "prompt_field": "question", "completion_field": "anser"},
            DataError,
            "completion_field: .*rows.csv:2 has no field 'anser'; the nearest is 'answer'",
        ),
        ({"templates": {"prompt": "{{"}}, ConfigError, r"data\.templates\.prompt: .*in line 1"),
    ],
)
def test_fields_are_checked_before_the_model_is_loaded(
    folder: Path, changes: dict[str, Any], error: type[Exception], why: str
):
    spec = read_recipe(folder / "recipe.yaml")
    spec = replace(
        spec, data=replace(spec.data, **changes), model=ModelSource(path="no/such/model")
    )
    with pytest.raises(error, match=why):
        set_up(spec, print)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"templates": {"answer": "x"}}, "templates.answer: .*it reads prompt, completion"),
        ({"templates": {"prompt": "x"}, "prompt_field": "q"}, "cannot be combined with prompt_f"),
        ({"format": "chat", "templates": {"messages": "x"}}, "templates.messages: format 'chat'"),
    ],
)
def test_templates_that_a_format_does_not_read(changes: dict[str, Any], why: str):
    with pytest.raises(ConfigError, match=why):
        DataConfig(**{"format": "prompt_completion", **changes})


def test_a_config_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config: .*none\.json: no such file"):
        replace(recipe(tmp_path).model, config=str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [([0.4, 0.4], 0.0, 0.42), ([0.0, 0.0], 0.0, 1.0), ([-2.0, -2.001], -2.101, 0.0)],
)
def test_axes_of_flat_curves(
    values: list[float], lowest: float, highest: float, monkeypatch: pytest.MonkeyPatch
):
    from matplotlib.axes import Axes

    limits: list[tuple[float, float]] = []
    monkeypatch.setattr(Axes, "set_ylim", lambda self, *bounds: limits.append(bounds))
    svg_chart([Curve("a", list(enumerate(values)))], label="a")
    assert limits == [pytest.approx((lowest, highest), abs=1e-3)]
    svg_chart([Curve("a", [(0.0, 1.0), (1.0, 2.0)])], label="a")
    assert len(limits) == 1
