"""The folder of a run: what may begin in it, and what may go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint.runs.digest import digests
from jaxllm.checkpoint.runs.folder import numbered
from jaxllm.errors import ConfigError, RunError
from jaxllm.training.recipe import CHANGEABLE, Recipe
from jaxllm.training.recipe_file import to_plain
from jaxllm.training.run_card import flat
from jaxllm.training.state import Params

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
    before, now = settled(saved), settled(to_plain(recipe))
    changed = [
        f"{name}: was {json.dumps(before.get(name))}, is {json.dumps(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise RunError(
            f"{folder}: the run was started with other settings ({'; '.join(changed[:5])}); go on "
            "with those, or begin a new run in another folder"
        )


def settled(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that a run cannot change, under dotted names."""
    return {
        name: value
        for name, value in flat(plain).items()
        if not any(f"{name}.".startswith(f"{field}.") for field in CHANGEABLE)
    }


def fingerprint(frozen: Params) -> dict[str, str]:
    """Digests of parameters that checkpoints do not hold, so that a changed base is noticed."""
    return dict(sorted(digests(frozen).items())) if frozen else {}


def check_base(saved: Mapping[str, str], now: Mapping[str, str], folder: Path) -> None:
    """The parameters that are not in the checkpoint are those that the run began with.

    Raises:
        RunError: they are not.
    """
    changed = sorted(path for path in now.keys() | saved.keys() if now.get(path) != saved.get(path))
    if changed:
        raise RunError(
            f"{folder}: the base model is not the one that the run began with ({len(changed)} of "
            f"its tensors differ, such as {changed[0]}); give the same checkpoint"
        )


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and places of arrays, for `restore`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
