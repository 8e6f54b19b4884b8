"""Checks that a new run may start in a folder, or that a run may resume in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxllm.checkpoint.orbax.leaves import digests
from jaxllm.checkpoint.orbax.steps import numbered
from jaxllm.common.errors import ConfigError, RunError
from jaxllm.common.files import expanded
from jaxllm.common.validation import to_plain
from jaxllm.models.model import Model
from jaxllm.models.registry import architecture_of
from jaxllm.parallel.environment import changes, jax_settings
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.monitor.run_card import flat
from jaxllm.training.run.recipe import CHANGEABLE, Recipe
from jaxllm.training.state import Params

CHECKPOINTS = "checkpoints"
DTYPE = "model.dtype"


def folder_of(recipe: Recipe) -> Path:
    """Returns the recipe's `output_dir`.

    Raises:
        ConfigError: the recipe has none.
    """
    if recipe.output_dir is None:
        raise ConfigError("output_dir: missing; name the folder of the run with --output-dir")
    return expanded(recipe.output_dir)


def saved_steps(folder: Path) -> list[int]:
    """Lists the steps with a checkpoint, intact or not."""
    return numbered(folder / CHECKPOINTS)


def check_new(folder: Path) -> None:
    """Checks that a folder holds no run.

    Raises:
        RunError: the folder holds a run; the message says how to resume it.
    """
    steps, metrics = saved_steps(folder), folder / "metrics.jsonl"
    if steps or (metrics.exists() and metrics.stat().st_size):
        last = f", saved at step {max(steps)}" if steps else ""
        raise RunError(
            f"{folder}: holds a run already{last}; continue it with --resume, or name another "
            "folder"
        )


def check_same(saved: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """Checks that a resumed run has its original recipe, except for `CHANGEABLE` fields.

    Args:
        saved: metadata of its checkpoint.

    Raises:
        RunError: fields differ; they are named with both values.
    """
    before, now = fixed_fields(saved["recipe"]), fixed_fields(to_plain(recipe))
    before[DTYPE] = now[DTYPE] = None  # the settings have the dtype that was chosen
    check_unchanged(before, now, folder)


def settings_of(model: Model[Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """What a run computes with besides its recipe and data."""
    return {DTYPE: model.dtype.name, "tokenizer": tokenizer.digest(), **jax_settings()}


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raises RunError, which names them, if settings are not those that a run was started with."""
    if changed := changes(before, now):
        raise RunError(
            f"{folder}: the run was started with other settings ({changed}); resume with those, or "
            "start a new run in another folder"
        )


def fixed_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe that cannot change when a run resumes, under dotted names."""
    return {
        name: value
        for name, value in flat(plain).items()
        if not any(f"{name}.".startswith(f"{field}.") for field in CHANGEABLE)
    }


def base_of(model: Model[Any], frozen: Params, reference: Params | None = None) -> dict[str, Any]:
    """Config, generation config, and digests of the frozen parameters, which checkpoints omit.

    Args:
        reference: trained parameters before the first step, if a run compares with them (DPO).
    """
    config = flat(model.config.to_json(*architecture_of(model)))
    settings = model.generation_config
    generation = {} if settings is None else json.loads(json.dumps(settings.to_json()))

    # Floats as float32, which is exact, since another device may keep the same weights in another
    # dtype; one by one, so that there is one copy at a time.
    def digest(params: Params) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, x in sorted(params.items()):
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            found |= digests({path: x.astype(jnp.float32) if is_float else x})
        return found

    base = {"config": config, "generation_config": generation, "tensors": digest(frozen)}
    return base if reference is None else {**base, "reference": digest(reference)}


def check_base(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Checks that configs and frozen parameters are those that the run started from.

    Raises:
        RunError: they differ.
    """
    before, tensors = saved["tensors"], now["tensors"]
    if "reference" in now:  # an export has none
        before, tensors = {**before, **saved["reference"]}, {**tensors, **now["reference"]}
    paths = before.keys() | tensors.keys()
    differing = sorted(path for path in paths if before.get(path) != tensors.get(path))
    what = changes(saved["config"], now["config"]) or changes(
        saved["generation_config"], now["generation_config"]
    )
    if differing:
        what = f"{len(differing)} of its tensors differ, such as {differing[0]}"
    if what:
        raise RunError(
            f"{folder}: the base model is not the one that the run started from ({what}); give the "
            "same checkpoint"
        )
