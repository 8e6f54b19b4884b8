"""A run with DPO: its metrics and report, the stored reference, and what resumes it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import go_on, measured, plain, preference_fields, saved

import jaxllm
from jaxllm.common.errors import ConfigError, DataError, RunError
from jaxllm.common.validation import from_plain
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run import train
from jaxllm.training.run.setup import REFERENCE_FILE, initial_model

NAMES = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}


def preferences(folder: Path, family: str = "llama", **changes: Any) -> Recipe:
    return from_plain(Recipe, plain(folder, family, **preference_fields(folder, family) | changes))


@pytest.mark.slow
def test_a_run_resumes_with_its_stored_reference(tmp_path: Path):
    recipe = preferences(tmp_path, max_steps=3)
    result = train(recipe, quiet=True)
    stored = result.folder / REFERENCE_FILE
    before = stored.read_bytes()
    go_on(recipe, max_steps=5)
    assert stored.read_bytes() == before
    rows = measured(result.folder)
    assert rows[0].keys() >= NAMES | {"logps/chosen", "logps/rejected"}
    assert "accuracy" not in rows[0]
    assert rows[-1].keys() >= {f"eval_{name}" for name in NAMES}
    assert rows[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert rows[-1]["eval_rewards/margins"] > rows[2]["eval_rewards/margins"] > 1e-4
    assert "Chosen answer preferred" in (result.folder / "report.html").read_text()

    np.savez(stored, **{name: logps + 1 for name, logps in np.load(stored).items()})
    with pytest.raises(DataError, match="reference was"):
        go_on(recipe, max_steps=6)
    stored.write_bytes(b"PK")
    with pytest.raises(RunError, match=re.escape(f"{stored}: cannot be read")):
        go_on(recipe, max_steps=6)


@pytest.mark.slow
def test_two_halves_equal_one_run(tmp_path: Path):
    (tmp_path / "half").mkdir()
    full = train(preferences(tmp_path), quiet=True)
    half = preferences(tmp_path / "half", max_steps=3)
    train(half, quiet=True)
    assert saved(go_on(half, max_steps=6).folder) == saved(full.folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_all_weights_of_other_families(tmp_path: Path, family: str):
    """A run without LoRA learns every pair; the reference stays what the model was."""
    flat = {"learning_rate": 1e-2}
    recipe = preferences(tmp_path, family, lora=None, max_steps=150, optimizer=flat)
    metrics = train(recipe, quiet=True).metrics
    assert metrics["eval_rewards/accuracies"] == 1.0
    assert metrics["eval_rewards/margins"] > 1


@pytest.mark.ci
def test_another_base_model_computes_no_reference(tmp_path: Path):
    """Log-probabilities of new evaluation data would be those of another model."""
    source = {"path": str(tmp_path / "model"), "tokenizer": "bytes"}
    recipe = preferences(tmp_path, lora=None, max_steps=2, model=source)

    def save_model(seed: int) -> None:
        net, _ = initial_model(preferences(tmp_path, lora=None, seed=seed))
        jaxllm.save_hf(tmp_path / "model", net, overwrite=True)

    save_model(0)
    stored = train(dataclasses.replace(recipe, max_steps=1), quiet=True).folder / REFERENCE_FILE
    before = stored.read_bytes()
    save_model(1)
    path = tmp_path / "other.jsonl"
    path.write_text((tmp_path / "pairs.jsonl").read_text().replace("yes", "yea"))
    assert recipe.eval_data is not None
    other = dataclasses.replace(recipe.eval_data, path=str(path))
    with pytest.raises(RunError, match=r"base model is not the one .* tensors differ"):
        go_on(recipe, eval_data=other)
    assert stored.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dpo": None}, "dpo: required by data.format 'preference'; `dpo: {}` has the defaults"),
        ({"label_smoothing": 0.1}, "label_smoothing, z_loss: have no effect on DPO; see dpo"),
        ({"eval_data": {"format": "text", "path": "x"}}, "eval_data.format: 'text', but DPO"),
    ],
)
def test_recipes_that_contradict_themselves(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        preferences(tmp_path, **changes)
