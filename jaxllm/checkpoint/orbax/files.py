"""Writes and reads a step with Orbax: arrays and a record in one atomic folder."""

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
CACHE_BYTES = 10**8  # for OCDBT's index, which every array reads


def orbax() -> Any:
    """`orbax.checkpoint`, imported on first use: the import takes a second."""
    return importlib.import_module("orbax.checkpoint")


def async_checkpointer() -> Any:
    """An Orbax checkpointer that writes in the background and renames the finished folder.

    Not a `CheckpointManager`: its `save` returns True for saves that fail later, and its
    `latest_step` counts empty folders.
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
    """Starts a save; returns once the arrays are copied and may be donated or deleted."""
    args = orbax().args
    items = args.Composite(
        **{ARRAYS: args.PyTreeSave(dict(arrays)), "record": args.JsonSave(dict(record))}
    )
    checkpointer.save(path.absolute(), args=items)


def read_arrays(path: Path, target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads the named arrays of a step's folder onto the shardings of the target.

    TensorStore reads what Orbax wrote (zarr in OCDBT): only the shards that this process needs,
    without waiting for other processes. Orbax's own reader leaves tasks behind when a file is
    damaged, which print tracebacks when they are garbage collected.

    Raises TensorStore's errors for a damaged folder. Damage that it misses shows in the digests.
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
