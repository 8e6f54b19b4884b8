"""The only place that knows Orbax: arrays and a record go out as one atomic folder, and come in."""

from __future__ import annotations

import concurrent.futures
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.common.errors import CheckpointError

ARRAYS = "arrays"
READERS = 8
CACHE_BYTES = 10**8  # for the index of OCDBT, which every array looks into


def orbax() -> Any:
    """`orbax.checkpoint`, imported at its first use: that takes a second."""
    return importlib.import_module("orbax.checkpoint")


def async_checkpointer() -> Any:
    """Writes beside the target in the background, and renames when all is there.

    `AsyncCheckpointer` and no `CheckpointManager`: the latter's `save` says True of what fails
    later, and its `latest_step` counts empty folders.
    """
    ocp = orbax()
    arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)  # as `read_arrays` reads
    handler = ocp.CompositeCheckpointHandler(
        **{ARRAYS: arrays, "record": ocp.JsonCheckpointHandler()}
    )
    return ocp.AsyncCheckpointer(handler)


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

    TensorStore alone reads what Orbax wrote (zarr in OCDBT): only the shards that this process
    needs, without waiting for other processes. Orbax's own way in leaves tasks behind when a file
    is damaged, which print their tracebacks whenever they are collected.

    Raises whatever TensorStore raises of a damaged folder. What it does not notice shows in the
    digests.
    """
    ts = importlib.import_module("tensorstore")
    context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})

    def read(name: str) -> jax.Array:
        like = target[name]
        spec = {
            "driver": "zarr",
            "fill_missing_data_reads": False,
            "kvstore": {
                "driver": "ocdbt",
                "base": {"driver": "file", "path": f"{path / ARRAYS}/"},
                "path": f"{name}/",
            },
        }
        store = ts.open(spec, open=True, read=True, context=context).result()
        if (store.shape, store.dtype.numpy_dtype) != (like.shape, like.dtype):
            raise CheckpointError(f"{name} is {store.dtype.name}{list(store.shape)} on disk")
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: store[index].read().result()
        )

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return dict(zip(target, pool.map(read, target), strict=True))
