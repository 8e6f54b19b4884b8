"""Errors and warnings before the first step: wrong sections, answers without room, slow rows."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import AbstractMesh
from tiny_runs import plain, recipe

from jaxllm.common.errors import ConfigError, DataError, JaxLLMError, MissingExtraError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo
from jaxllm.training.evaluation import generation_rows
from jaxllm.training.run.recipe import Evaluation, MeshSizes, ModelSource
from jaxllm.training.run.run import train
from jaxllm.training.run.setup import SECONDS, check_rows, rows_progress, set_up

CAUSAL = ModelInfo(kind="causal", vocab_size=260, context_length=32)


@pytest.mark.ci
def test_the_section_of_a_wrong_field_is_named(tmp_path: Path):
    spec = recipe(tmp_path)
    longer = replace(spec.data, max_length=99)
    with pytest.raises(ConfigError, match=r"^data: max_length: 99 tokens, but .* context has 32"):
        set_up(replace(spec, data=longer), print)
    with pytest.raises(ConfigError, match=r"^eval_data: max_length: 99 tokens"):
        set_up(replace(spec, eval_data=longer), print)


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        ("wandb", {"wandb": "answers"}),
        ("tensorboardX", {"tensorboard": True}),
        ("sacrebleu", {"evaluation": Evaluation(metrics=("bleu",))}),
    ],
)
def test_a_missing_package_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, fields: dict[str, Any]
):
    monkeypatch.setitem(sys.modules, module, None)  # what Python does for a missing one
    spec = recipe(tmp_path)
    fields |= {"model": ModelSource(path="no/such/model"), "eval_data": spec.data}
    with pytest.raises(MissingExtraError, match=f"package {module}: pip install"):
        set_up(replace(spec, **fields), print)


@pytest.mark.ci
def test_steps_beyond_the_schedule_are_told(tmp_path: Path):
    said: list[str] = []
    spec = recipe(tmp_path)
    assert spec.optimizer.schedule_steps == 20
    set_up(replace(spec, max_steps=20), said.append)
    assert not any("learning rate" in line for line in said)
    set_up(replace(spec, max_steps=21), said.append)
    assert "the learning rate is 0 from step 20 on (optimizer.schedule_steps)" in said[-1]


def test_rows_are_counted_rows_progress():
    said: list[str] = []
    seconds = 5.0
    progress = rows_progress(said.append, "training data", now=lambda: seconds)
    for done, passed in ((1, 1.0), (900, SECONDS), (1000, 1.0), (2000, SECONDS), (9999, SECONDS)):
        seconds += passed
        progress(done, 9999)
    assert said == [
        "training data: 900 of 9,999 rows are encoded",
        "training data: 2,000 of 9,999 rows are encoded",
    ]


def pairs(folder: Path, *prompts: str) -> dict[str, Any]:
    rows = ({"prompt": prompt, "completion": "b"} for prompt in prompts)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"format": "prompt_completion", "path": str(folder / "pairs.jsonl"), "max_length": 32}


@pytest.mark.by_default("llama-fields1-the prompt has 28 tokens, but `max_length` is 20")
@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gpt2", {"max_new_tokens": 8}, r"a prompt of 28 tokens and 8 new ones need 36 positions"),
        ("llama", {"max_length": 20}, r"the prompt has 28 tokens, but `max_length` is 20"),
    ],
)
def test_answers_without_room_are_told_before_the_first_step(
    tmp_path: Path, family: str, fields: dict[str, int], message: str
):
    """Not when the first evaluation comes to them, after hours."""
    data = pairs(tmp_path, "a", "a" * 28)
    evaluation = {"metrics": ["exact_match"], "fields": fields}
    spec = recipe(tmp_path, family, data=data, eval_data=data, evaluation=evaluation)
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{message}"):
        set_up(spec, print)


def test_rows_that_are_dropped_are_not_generated_for(tmp_path: Path):
    data = DataConfig(**pairs(tmp_path, "a", "c" * 40, "d"))
    dropping = replace(data, on_too_long="drop")
    actual = generation_rows(dropping, byte_tokenizer(), CAUSAL)
    assert [list(row.prompt) for row in actual] == [[97], [100]]
    assert len(generation_rows(dropping, byte_tokenizer(), CAUSAL, 1)) == 1
    assert len(generation_rows(data, byte_tokenizer(), CAUSAL)) == 3


def test_prompts_are_as_long_as_in_training(tmp_path: Path):
    """Cut sources, and no prompt that is cut before its answer."""
    data = DataConfig(**pairs(tmp_path, "a", "c" * 40, "d"), on_too_long="truncate")
    actual = generation_rows(data, byte_tokenizer(), CAUSAL)
    assert [list(row.prompt) for row in actual] == [[97], [100]]
    fields = {"format": "seq2seq", "source_field": "prompt", "target_field": "completion"}
    model = replace(CAUSAL, kind="seq2seq")
    cut = generation_rows(replace(data, **fields), byte_tokenizer(), model)[1]
    assert list(cut.prompt) == [ord("c")] * 31 + [byte_tokenizer().eos_token_id]


def test_patterns_and_batches_are_checked_before_the_first_step(tmp_path: Path):
    spec = recipe(tmp_path)
    optimizer = replace(spec.optimizer, no_decay=("position_bias", "embedd"))
    with pytest.raises(ConfigError, match=r"no_decay: 'embedd' matches no trained parameter"):
        set_up(replace(spec, optimizer=optimizer), print)
    mesh: Any = AbstractMesh((2, 2, 1), ("data", "fsdp", "tensor"))
    check_rows(replace(spec, accumulation=2), mesh)
    spec = replace(spec, eval_data=spec.data)
    check_rows(spec, mesh)
    with pytest.raises(ConfigError, match=r"^evaluation.batch_size: 2 rows .* over 4 devices"):
        check_rows(replace(spec, accumulation=2), mesh)
    with pytest.raises(ConfigError, match=r"^batch_size: 6 rows cannot be split over 4 devices"):
        check_rows(replace(spec, batch_size=6), mesh)


@pytest.mark.parametrize(
    "answer", [{"tool_calls": [{"name": "f"}]}, {"content": None, "reasoning": "b"}]
)
def test_answers_that_are_no_text(tmp_path: Path, answer: dict[str, Any]):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    data = DataConfig(format="chat", path=str(tmp_path / "chat.jsonl"), chat_template="{{ 1 }}")
    with pytest.raises(DataError, match=r"chat\.jsonl:1: messages\[1\]: .* compare texts"):
        generation_rows(data, byte_tokenizer(), CAUSAL)


@pytest.mark.ci
def test_the_metric_and_its_direction(tmp_path: Path):
    data = plain(tmp_path)["data"]
    for changes, message in (
        ({"metric": "eval_accuracy"}, "'min', but a larger eval_accuracy is better; set mode: max"),
        ({"mode": "max"}, "'max', but a smaller eval_loss is better; set mode: min"),
    ):
        with pytest.raises(ConfigError, match=message):
            set_up(recipe(tmp_path, eval_data=data, checkpoints=changes), print)


def test_a_mesh_that_does_not_fit_leaves_no_folder(tmp_path: Path):
    spec = replace(recipe(tmp_path), mesh=MeshSizes(data=64), output_dir=str(tmp_path / "run"))
    with pytest.raises(JaxLLMError, match="64"):
        train(spec, quiet=True)
    assert not (tmp_path / "run").exists()
