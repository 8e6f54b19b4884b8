"""The only place that knows Orbax: arrays and a record go out as one atomic folder, and come in."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.errors import UnsupportedError

ARRAYS = "arrays"


def orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as failure:
        raise UnsupportedError(
            f"checkpoints need orbax-checkpoint, which cannot be imported ({failure}): "
            "pip install 'jaxllm[train]'"
        ) from failure


def async_checkpointer() -> Any:
    """Writes beside the target in the background, and renames when all is there.

    `AsyncCheckpointer` and no `CheckpointManager`: the latter's `save` says True of what fails
    later, and its `latest_step` counts empty folders.
    """
    return orbax().AsyncCheckpointer(orbax().CompositeCheckpointHandler())


def start_saving(
    checkpointer: Any,
    path: Path,
    arrays: Mapping[str, jax.Array],
    record: Mapping[str, str],
) -> None:
    """Returns once the arrays are copied: they may then be donated or deleted."""
    args = orbax().args
    items = args.Composite(
        **{ARRAYS: args.PyTreeSave(dict(arrays)), "record": args.JsonSave(dict(record))}
    )
    checkpointer.save(path.absolute(), args=items)


def read_arrays(path: Path, target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The named arrays of a step's folder on the shardings of the target; the others are left out.

    Raises whatever Orbax and TensorStore raise of a damaged folder. What they do not notice, such
    as a missing chunk, which reads as zeros, shows in the digests. No process waits for another.
    """
    ocp = orbax()
    restore_args = {
        name: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
        for name, x in target.items()
    }
    args = ocp.args.PyTreeRestore(
        item=dict(target), restore_args=restore_args, partial_restore=True
    )
    folder = importlib.import_module("etils.epath").Path((path / ARRAYS).absolute())
    return ocp.PyTreeCheckpointHandler().restore(folder, args=args)
