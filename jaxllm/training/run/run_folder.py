"""The folder of a run: what may begin in it, and what may go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint.orbax.digest import digests
from jaxllm.checkpoint.orbax.step_folders import numbered
from jaxllm.common.errors import ConfigError, RunError
from jaxllm.models.config_export import config_to_json
from jaxllm.models.registry import architecture_of
from jaxllm.training.monitor.run_card import flat
from jaxllm.training.run.recipe import CHANGEABLE, Recipe
from jaxllm.training.state import Params
from jaxllm.training.validation import to_plain

CHECKPOINTS = "checkpoints"


def folder_of(recipe: Recipe) -> Path:
    if recipe.output_dir is None:
        raise ConfigError("output_dir: name the folder of the run (--output-dir)")
    return Path(recipe.output_dir).expanduser()


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, be it sound or not."""
    return numbered(folder / CHECKPOINTS)


def check_ahead(step: int, max_steps: int, folder: Path) -> None:
    """A run goes on from where it is, and never back.

    Raises:
        RunError: it is beyond `max_steps` already.
    """
    if step > max_steps:
        raise RunError(
            f"{folder}: the run is at step {step}, beyond max_steps, {max_steps}; set a larger one"
        )


def check_new(folder: Path) -> None:
    """A run begins in a folder without one.

    Raises:
        RunError: there is one; says how to go on with it.
    """
    steps, metrics = saved_steps(folder), folder / "metrics.jsonl"
    if steps or (metrics.exists() and metrics.stat().st_size):
        at = f", saved at step {max(steps)}" if steps else ""
        raise RunError(
            f"{folder}: holds a run already{at}; pass --resume to go on with it, or name another "
            "folder"
        )


def check_same(saved: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """A run goes on with what its weights follow from unchanged.

    Raises:
        RunError: names each field that was changed.
    """
    if changed := changes(settled(saved), settled(to_plain(recipe))):
        raise RunError(
            f"{folder}: the run was started with other settings ({changed}); go on with those, or "
            "begin a new run in another folder"
        )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first few fields that differ, with both values; nothing if none does.

    >>> changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": "x"})
    'b: was 2, is 3; c: was null, is "x"'
    """
    found = [
        f"{name}: was {json.dumps(before.get(name))}, is {json.dumps(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return "; ".join(found[:5])


def settled(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that a run cannot change, under dotted names."""
    return {
        name: value
        for name, value in flat(plain).items()
        if not any(f"{name}.".startswith(f"{field}.") for field in CHANGEABLE)
    }


def base_of(model: Any, frozen: Params) -> dict[str, Any]:
    """What a model has that checkpoints do not hold, so that a change of it is noticed: its config,
    and digests of the parameters that are not trained."""
    config = flat(config_to_json(model.config, *architecture_of(model)))
    return {"config": config, "tensors": dict(sorted(digests(frozen).items()))}


def check_base(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """The model, but for what is trained, is the one that the run began with.

    Raises:
        RunError: it is not.
    """
    before, tensors = saved["tensors"], now["tensors"]
    paths = before.keys() | tensors.keys()
    differing = sorted(path for path in paths if before.get(path) != tensors.get(path))
    what = changes(saved["config"], now["config"])
    if differing:
        what = f"{len(differing)} of its tensors differ, such as {differing[0]}"
    if what:
        raise RunError(
            f"{folder}: the base model is not the one that the run began with ({what}); give the "
            "same checkpoint"
        )


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and places of arrays, for `restore`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
