"""N steps, a stop and M steps are N + M steps, to the bit, with every part of a checkpoint in use.

Checkpoints hold a digest of every array's bits, so runs are compared by these.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from folder_cases import write
from tiny_runs import MODELS, measured, recipe, saved

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.errors import RunError
from jaxllm.tokenizers import FastTokenizer
from jaxllm.training.run import run
from jaxllm.training.run.export import export
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run import train

PACKED = {"max_length": 32, "packing": True}
LORA = {"rank": 2, "dropout": 0.1}
CLASSIFIER = {
    "model_type": "llama",
    "architectures": ["LlamaForSequenceClassification"],
    "num_labels": 3,
    "pad_token_id": 257,
}


def text(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"path": str(folder / "rows.jsonl"), "format": "text", **changes}


def variant(name: str, folder: Path) -> Recipe:
    """One of the recipes that resuming is tested with; all have dropout and an average."""
    pairs = {"path": str(folder / "rows.jsonl"), "format": "seq2seq", "max_target_length": 32}
    if name == "llama":
        return recipe(folder, batch_size=4, accumulation=2, data=text(folder, **PACKED))
    if name == "gpt2 lora":
        adafactor = {"name": "adafactor", "learning_rate": 1e-2, "momentum": 0.9}
        data = text(folder, max_length=32, bucket=None)
        return recipe(folder, "gpt2", lora=LORA, data=data, optimizer=adafactor)
    if name == "t5":
        return recipe(folder, "t5", batch_size=4, accumulation=2, data=pairs | PACKED)
    if name == "llama dora":
        data = text(folder, **PACKED)
        return recipe(folder, lora=LORA | {"dora": True}, accumulation=2, data=data)
    if name == "gpt2":
        return recipe(folder, "gpt2", accumulation=2, data=text(folder, max_length=32))
    if name == "t5 lora":
        return recipe(folder, "t5", lora=LORA, data=pairs | {"max_length": 32})
    spec = recipe(folder, data=text(folder, max_length=32))
    source = spec.model
    assert source.config is not None
    config = dict(source.config)
    if name == "bfloat16":
        return recipe(
            folder,
            accumulation=2,
            data=text(folder, **PACKED),
            model={"config": config, "tokenizer": "bytes", "dtype": "bfloat16"},
        )
    assert name == "classifier"
    labelled = {"path": str(folder / "rows.jsonl"), "format": "classification", "max_length": 32}
    return recipe(
        folder, data=labelled, model={"config": config | CLASSIFIER, "tokenizer": "bytes"}
    )


VARIANTS = [
    "llama",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gpt2 lora", "t5", "llama dora", "gpt2", "t5 lora", "bfloat16", "classifier")
    ),
]


def stopped_at(made: Recipe, folder: Path, step: int) -> Recipe:
    """The recipe with the run in `folder`, up to a step."""
    return dataclasses.replace(made, output_dir=str(folder), max_steps=step)


@pytest.mark.ci
@pytest.mark.parametrize("name", VARIANTS)
def test_six_steps_and_six_more_are_twelve(name: str, tmp_path: Path):
    spec = variant(name, tmp_path)
    straight, halves = tmp_path / "straight", tmp_path / "halves"
    train(stopped_at(spec, straight, 12), quiet=True)
    train(stopped_at(spec, halves, 6), quiet=True)
    six = saved(halves)[0]
    train(stopped_at(spec, halves, 12), quiet=True, resume=True)
    assert saved(halves) == saved(straight)
    assert measured(halves) == measured(straight)
    assert [line["step"] for line in measured(halves)] == list(range(1, 13))
    # The steps after the stop did something to all that is trained.
    twelve = saved(halves)[0]
    changed = {name for name in six if six[name] != twelve[name]}
    assert {name for name in six if name.startswith(("params/", "ema/"))} <= changed
    assert {name.split("/")[0] for name in changed} == {"step", "params", "opt_state", "ema"}


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of twelve steps, and with one that stopped after six."""
    folder = tmp_path_factory.mktemp("halfway")
    spec = variant("llama", folder)
    train(stopped_at(spec, folder / "straight", 12), quiet=True)
    train(stopped_at(spec, folder / "six", 6), quiet=True)
    return folder


@pytest.mark.ci
def test_other_ids_of_texts_are_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that an earlier version began, which gave the tokenizer's texts other ids."""
    folder = write(tmp_path / "tokenizer", "phi3-4")
    model = {"config": MODELS["llama"] | {"vocab_size": 424}, "tokenizer": str(folder)}
    spec = stopped_at(recipe(tmp_path, model=model), tmp_path / "run", 1)
    with monkeypatch.context() as earlier:
        earlier.setattr(FastTokenizer, "ids_version", lambda self, files: 1)
        train(spec, quiet=True)
    with pytest.raises(RunError, match="run: token ids: an earlier version of jaxllm began it"):
        train(stopped_at(spec, tmp_path / "run", 2), quiet=True, resume=True)


@pytest.mark.ci
def test_a_run_goes_on_with_its_own_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An earlier version had an A for each of GPT-2's q, k and v, another order of the rows with
    `shuffle: false`, and half of an odd number of steps was rounded to an even number."""
    data = text(tmp_path, max_length=32, shuffle=False)  # six batches an epoch
    spec = recipe(tmp_path, "gpt2", lora=LORA, data=data, max_steps=None, epochs=0.75)
    now, straight, halves = (tmp_path / name for name in ("now", "straight", "halves"))
    assert train(dataclasses.replace(spec, output_dir=str(now)), quiet=True).step == 5
    with monkeypatch.context() as earlier:
        earlier.setattr(run, "RULES", 1)
        train(dataclasses.replace(spec, output_dir=str(straight)), quiet=True)
        train(dataclasses.replace(spec, output_dir=str(halves), epochs=0.25), quiet=True)
    with RunCheckpoints(halves / "checkpoints") as checkpoints:  # nor had its recipe this field
        recipe_of = checkpoints.read().meta["recipe"]
        del recipe_of["optimizer"]["scale_parameter"]
        checkpoints.amend(2, {"recipe": recipe_of}, metric=None)
    assert saved(halves)[0].keys() > saved(now)[0].keys()
    go_on = dataclasses.replace(spec, output_dir=str(halves))
    assert train(go_on, quiet=True, resume=True).step == 4
    assert train(go_on, quiet=True, resume=True).step == 4
    assert saved(halves) == saved(straight)
    assert measured(halves) == measured(straight)
    out = tmp_path / "adapter"
    export(halves, out, adapter=True)
    ranks = json.loads((out / "adapter_config.json").read_text())["rank_pattern"]
    assert ranks == {"transformer.h.0.attn.c_attn": 3 * LORA["rank"]}


LEFT_OUT = ("step", "params", "opt_state", "key", "ema", "data")


@pytest.mark.ci
@pytest.mark.parametrize("left_out", [None, *LEFT_OUT])
def test_every_part_of_a_checkpoint_is_restored(
    left_out: str | None, halfway: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The test of exactness is not blind: a run that goes on with one piece as a fresh process has
    it ends elsewhere. (The key of the run is a function of its seed: here, of another one.)"""
    restore = run.restore

    def forgetful(checkpoints, setup, base, folder):
        # Restoring deletes the arrays of the first state.
        names = [name for name in LEFT_OUT if name != "data"]
        fresh = {name: jax.tree.map(jnp.copy, getattr(setup.state, name)) for name in names}
        fresh["key"] = jax.device_put(jax.random.key(1), setup.state.key.sharding)
        position = setup.batches.state()
        state, evaluated = restore(checkpoints, setup, base, folder)
        if left_out == "data":
            setup.batches.restore(position)
        forgotten = {left_out: fresh[left_out]} if left_out in fresh else {}
        return state.replace(**forgotten), evaluated

    monkeypatch.setattr(run, "restore", forgetful)
    shutil.copytree(halfway / "six", tmp_path / "six")
    spec = variant("llama", halfway)
    train(stopped_at(spec, tmp_path / "six", 12), quiet=True, resume=True)
    arrays, data = saved(tmp_path / "six")
    expected, position = saved(halfway / "straight")
    if left_out is None:
        assert (arrays, data) == (expected, position)
        return
    differing = {name.split("/")[0] for name in expected if arrays[name] != expected[name]}
    assert ("ema" if left_out == "ema" else "params") in differing
