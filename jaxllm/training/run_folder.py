"""The folder of a run: what may begin in it, and what may go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoint.runs.digest import digests
from jaxllm.errors import ConfigError, RunError
from jaxllm.training.recipe import CHANGEABLE, Recipe
from jaxllm.training.recipe_file import to_plain
from jaxllm.training.run_card import flat
from jaxllm.training.state import Params

CHECKPOINTS = "checkpoints"
MOVABLE = ("data.path", "data.dataset")  # their contents are compared in their place


def folder_of(recipe: Recipe) -> Path:
    if recipe.output_dir is None:
        raise ConfigError("output_dir: name the folder of the run (--output-dir)")
    return Path(recipe.output_dir).expanduser()


def check_new(folder: Path) -> None:
    """A run begins in a folder without one.

    Raises:
        RunError: there is one; says how to go on with it.
    """
    steps = folder / CHECKPOINTS
    numbers = [int(p.name) for p in steps.glob("*") if p.name.isdigit()] if steps.is_dir() else []
    metrics = folder / "metrics.jsonl"
    if numbers or (metrics.exists() and metrics.stat().st_size):
        at = f", saved at step {max(numbers)}" if numbers else ""
        raise RunError(
            f"{folder}: holds a run already{at}; pass --resume to go on with it, or name another "
            "folder"
        )


def check_same(saved: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """A run goes on with what its weights follow from unchanged.

    Raises:
        RunError: names each field that was changed.
    """
    before, now = (flat(settled(plain)) for plain in (saved, to_plain(recipe)))
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
    """The part of a recipe that a run cannot change."""
    kept = {name: value for name, value in plain.items() if name not in CHANGEABLE}
    for name in MOVABLE:
        group, field = name.split(".")
        kept[group] = {k: v for k, v in kept[group].items() if k != field}
    return kept


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
