"""From runs to files: the weights that a run ended with, or began to get worse after."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import jaxllm
from jaxllm.checkpoint.peft import load_adapter
from jaxllm.cli.export import main
from jaxllm.common.errors import ConfigError, MissingFileError, RunError
from jaxllm.common.validation import from_plain
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters
from jaxllm.tokenizers import load_tokenizer
from jaxllm.training.monitor.metrics_log import read_metrics
from jaxllm.training.run.export import export, load_run, save_label_names
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run import RunResult, train
from jaxllm.training.run.setup import initial_model

MODELS = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "llama": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
    "t5": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 257,
    },
}
DATA = {"format": "text", "path": "text.jsonl"}
ENDS = {"vocab_size": 258, "eos_token_id": 256, "bos_token_id": 256, "pad_token_id": 257}


def run(folder, family: str = "llama", **changes) -> RunResult:
    """A run of three steps on a new model."""
    pairs = [{"source": f"{n} + 1 =", "target": str(n + 1)} for n in range(16)]
    names = ("source", "target") if family == "t5" else ("prompt", "completion")
    path = folder / "rows.jsonl"
    rows = (dict(zip(names, pair.values(), strict=True)) for pair in pairs)
    path.write_text("\n".join(map(json.dumps, rows)))
    data = {"format": "seq2seq" if family == "t5" else "prompt_completion", "path": str(path)}
    data |= {"max_length": 16, "bucket": 16}
    recipe = {
        "model": {"config": {"model_type": family, **ENDS, **MODELS[family]}, "tokenizer": "bytes"},
        "data": data,
        "output_dir": str(folder / "run"),
        "max_steps": 3,
        "batch_size": 4,
        "optimizer": {"learning_rate": 0.05},
        "checkpoints": {"every": 1, "keep": 3},
        **changes,
    }
    return train(from_plain(Recipe, recipe), quiet=True)


def same(a, b) -> None:
    ours, theirs = parameters(a), parameters(b)
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        np.testing.assert_array_equal(x, theirs[path], err_msg=path)


@pytest.mark.ci
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5"))],
)
def test_a_run_becomes_a_folder_that_loads(tmp_path, family):
    result = run(tmp_path, family)
    actual = export(tmp_path / "run", tmp_path / "out")
    assert actual.step == 3
    model, tokenizer = jaxllm.load(tmp_path / "out")
    same(model, result.model)
    assert tokenizer.encode("ab") == result.tokenizer.encode("ab")
    assert type(model) is type(result.model)


@pytest.mark.ci
def test_lora_is_merged_or_goes_out_alone(tmp_path):
    result = run(tmp_path, lora={"rank": 2, "alpha": 8.0, "dora": True})
    ids = np.arange(8, dtype=np.int32)[None] + 97
    expected = result.model(ids).logits
    export(tmp_path / "run", tmp_path / "merged")
    merged, _ = jaxllm.load(tmp_path / "merged")
    np.testing.assert_allclose(merged(ids).logits, expected, atol=1e-5)
    assert not any("lora" in path for path in parameters(merged))

    export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    recipe = dataclasses.replace(load_run(tmp_path / "run").recipe, lora=None)
    base, _ = initial_model(recipe)
    assert np.abs(np.asarray(base(ids).logits - expected)).max() > 1e-3
    adapted = load_adapter(base, tmp_path / "adapter")
    np.testing.assert_allclose(adapted(ids).logits, expected, atol=1e-5)


@pytest.mark.ci
def test_best_last_and_numbered_steps(tmp_path):
    # A learning rate under which the loss on the set goes up after the first step.
    changes = {"optimizer": {"name": "sgd", "learning_rate": 30.0, "clip_norm": None}}
    rows = {"format": "prompt_completion", "path": str(tmp_path / "rows.jsonl"), "max_length": 16}
    run(tmp_path, eval_data=rows, evaluation={"every": 1}, **changes)
    best = min(read_metrics(tmp_path / "run" / "metrics.jsonl"), key=lambda row: row["eval_loss"])[
        "step"
    ]
    assert best != 3
    assert load_run(tmp_path / "run").step == best
    assert load_run(tmp_path / "run", "best").step == best
    assert load_run(tmp_path / "run", "last").step == 3
    assert load_run(tmp_path / "run", 2).step == 2
    with pytest.raises(MissingFileError, match="no checkpoint of step 9"):
        load_run(tmp_path / "run", 9)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"


@pytest.mark.ci
def test_the_chat_template_of_the_training_goes_out(tmp_path):
    """Without it nobody could ask the model what it has learnt to answer."""
    turns = [{"role": role, "content": "ab"} for role in ("user", "assistant")]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    template = TEMPLATE + "{% if add_generation_prompt %}assistant: {% endif %}"
    chat = {"format": "chat", "path": str(tmp_path / "chat.jsonl"), "chat_template": template}
    run(tmp_path, data=chat, max_steps=1, lora={"rank": 2})
    for name, adapter in (("merged", False), ("adapter", True)):
        export(tmp_path / "run", tmp_path / name, adapter=adapter)
        tokenizer = load_tokenizer(tmp_path / name)
        assert tokenizer.chat_template == template
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert config["chat_template"] == template


def test_names_of_classes_go_out(tmp_path):
    raw = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}
    raw |= {"model_type": "llama", **ENDS, **MODELS["llama"]}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"id2label": dict.fromkeys("012", "")}))
    save_label_names(tmp_path / "config.json", ("bad", "good", "fair"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good", "2": "fair"}
    assert config["label2id"] == {"bad": 0, "good": 1, "fair": 2}
    assert model_spec(config).config.num_labels == 3


@pytest.mark.ci
def test_a_base_that_has_moved(tmp_path):
    new = {"config": {"model_type": "llama", **ENDS, **MODELS["llama"]}, "tokenizer": "bytes"}
    jaxllm.save_hf(
        tmp_path / "base", *initial_model(from_plain(Recipe, {"model": new, "data": DATA}))
    )
    result = run(tmp_path, model={"path": str(tmp_path / "base")}, lora={"rank": 2}, max_steps=1)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(MissingFileError, match="base"):
        load_run(tmp_path / "run")
    same(load_run(tmp_path / "run", model=str(tmp_path / "elsewhere")).model, result.model)


@pytest.mark.ci
def test_the_average_is_what_goes_out(tmp_path):
    result = run(tmp_path, ema_decay=0.5)
    averaged = load_run(tmp_path / "run").model
    same(averaged, result.model)
    last = load_run(tmp_path / "run", averaged=False).model
    path = "backbone.embed.weight"
    assert (parameters(averaged)[path] != parameters(last)[path]).any()


@pytest.mark.ci
def test_what_cannot_be_exported(tmp_path, capsys):
    run(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunError, match="full: exists already"):
        export(tmp_path / "run", tmp_path / "full")
    long = "x" * 300
    with pytest.raises(RunError, match=r"cannot be written \(File name too long"):
        export(tmp_path / "run", tmp_path / long)
    with pytest.raises(RunError, match=r"cannot be read \(File name too long"):
        export(tmp_path / long, tmp_path / "out")
    with pytest.raises(RunError, match="trained without LoRA"):
        export(tmp_path / "run", tmp_path / "out", adapter=True)
    with pytest.raises(ConfigError, match="dtype: an adapter"):
        export(tmp_path / "run", tmp_path / "out", adapter=True, dtype="bfloat16")
    with pytest.raises(MissingFileError, match="not the folder of a run"):
        export(tmp_path / "full", tmp_path / "out")
    with pytest.raises(ConfigError, match="started from random weights"):
        load_run(tmp_path / "run", model="elsewhere")
    with pytest.raises(MissingFileError, match="no evaluation"):
        export(tmp_path / "run", tmp_path / "out", step="best")
    assert not (tmp_path / "out").exists()
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--step", "one"]) == 2
    assert "--step: expected a number, best or last, found 'one'" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "9" * 5000]) == 2
    assert "dtype: expected float32, bfloat16 or float16, found '999" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "the model of step 3" in capsys.readouterr().out
    assert jaxllm.load(tmp_path / "out", param_dtype=None)[0].card.origin.dtypes[0][1] == "bfloat16"
