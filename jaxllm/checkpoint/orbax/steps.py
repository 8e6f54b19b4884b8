"""Steps of a run on disk: a folder each, with arrays in Orbax's format and a record.

The record is one checked file: the caller's meta, the metric, and a digest of every array.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.checkpoint.orbax.leaves import Leaf
from jaxllm.common.errors import CheckpointError, naming_file
from jaxllm.common.files import parse_json, read_json, write_whole
from jaxllm.common.optional_packages import import_untyped
from jaxllm.common.threads import with_settings_of_this_thread

RECORD_FILE = Path("record") / "metadata"  # the name that Orbax gives to a JSON item
ARRAYS = "arrays"
READERS = 8
CACHE_BYTES = 10**8  # for OCDBT's index, which every array reads
FORMAT = 1
MAX_SEAL_BYTES = 2**30
LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleting)")


@dataclasses.dataclass(frozen=True)
class Record:
    """A step without its arrays. `metric` decides which step is the best."""

    step: int
    meta: Any
    metric: float | None
    leaves: Mapping[str, Leaf]
    measured_on: str | None = None
    """What the metric was measured on; metrics of different texts are not compared."""


def seal(record: Record) -> dict[str, str]:
    """The record as JSON text, with the text's SHA-256."""
    content = {
        "format": FORMAT,
        "step": record.step,
        "metric": record.metric,
        "measured_on": record.measured_on,
        "meta": record.meta,
        "leaves": {n: [x.dtype, list(x.shape), x.digest] for n, x in record.leaves.items()},
    }
    try:
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as failure:
        raise CheckpointError(f"meta: not JSON ({failure})") from failure
    if parse_json(text.encode(), source="meta", error=CheckpointError)["meta"] != record.meta:
        raise CheckpointError(
            "meta: JSON would change it (tuples become lists, keys become strings); pass dicts "
            "with string keys, lists, strings, numbers, booleans and None only"
        )
    return {"sha256": checksum(text), "record": text}


def read_record(folder: Path) -> Record:
    """Reads the record of a step's folder."""
    path = folder / RECORD_FILE
    sealed = read_json(path, max_bytes=MAX_SEAL_BYTES, error=CheckpointError)
    if not isinstance(sealed, dict) or sealed.keys() != {"sha256", "record"}:
        raise CheckpointError(f"{path}: not the record of a checkpoint")
    text = sealed["record"]
    if not isinstance(text, str) or sealed["sha256"] != checksum(text):
        raise CheckpointError(f"{path}: the text and its checksum differ")
    content = parse_json(text.encode(), source=str(path), error=CheckpointError)
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {content['format']}, expected {FORMAT}")
    if str(content["step"]) != folder.name:
        raise CheckpointError(f"{path}: of step {content['step']}, not of step {folder.name}")
    leaves = {
        name: Leaf(dtype, tuple(shape), digest)
        for name, (dtype, shape, digest) in content["leaves"].items()
    }
    return Record(
        content["step"], content["meta"], content["metric"], leaves, content["measured_on"]
    )


def replace_record(folder: Path, record: Record) -> None:
    """Replaces a step's record atomically."""
    path = folder / RECORD_FILE
    with naming_file(path, CheckpointError, "written"):
        write_whole(path, json.dumps(seal(record)).encode())


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def numbered(folder: Path) -> list[int]:
    """Steps that have a folder, in order, complete or not."""
    if not os.path.isdir(folder):  # False for a name that is too long
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(n) for n in names if n.isdecimal() and n.isascii() and n == str(int(n)))


def complete(folder: Path) -> list[int]:
    """The committed steps, in order: those with a record."""
    return [step for step in numbered(folder) if (folder / str(step) / RECORD_FILE).is_file()]


def best(metrics: Mapping[int, float | None], mode: str) -> int | None:
    """The step with the smallest metric (mode "min") or the largest ("max"); the first on a tie.

    >>> best({1: 0.5, 2: 0.25, 3: None, 4: 0.25}, "min")
    2
    """
    sign = -1 if mode == "max" else 1
    known = [(sign * metric, step) for step, metric in metrics.items() if metric is not None]
    return min(known)[1] if known else None


def comparable(records: Mapping[int, Record]) -> dict[int, float | None]:
    """Metrics by step; None also where one was measured on something else than the newest."""
    measured = [step for step, record in records.items() if record.metric is not None]
    newest = records[max(measured)].measured_on if measured else None
    return {
        step: record.metric if record.measured_on == newest else None
        for step, record in records.items()
    }


def remove(folder: Path, step: int) -> None:
    """Deletes a step. Renamed first, since a half-deleted step would look damaged."""
    doomed = folder / f"{step}.deleting"
    (folder / str(step)).rename(doomed)
    shutil.rmtree(doomed)


def set_aside(folder: Path, step: int) -> None:
    """Renames a damaged step: ``9`` becomes ``9.damaged``, for the user to inspect."""
    path, aside = folder / str(step), folder / f"{step}.damaged"
    if path.exists():
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)


def clean(folder: Path) -> None:
    """Removes leftovers of interrupted saves and deletions. Only the writer may call it."""
    for path in folder.iterdir():
        if LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def size(folder: Path) -> int:
    """Total bytes of all files in the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def orbax() -> Any:
    """`orbax.checkpoint`, imported on first use: the import takes a second."""
    return import_untyped("orbax.checkpoint")


def async_checkpointer() -> Any:
    """An Orbax checkpointer that writes in the background and renames the finished folder.

    Not a `CheckpointManager`: its `save` returns True for saves that fail later, and its
    `latest_step` counts empty folders.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_no_trace_of_orbax)
    ocp = orbax()
    arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)  # as `read_arrays` reads
    handler = ocp.CompositeCheckpointHandler(
        **{ARRAYS: arrays, "record": ocp.JsonCheckpointHandler()}
    )
    return ocp.AsyncCheckpointer(handler)


def is_no_trace_of_orbax(record: logging.LogRecord) -> bool:
    """False for tracebacks that are logged of a failed save, which is raised as one error too."""
    if not record.exc_info:
        return True
    files = [frame.filename for frame in traceback.extract_tb(record.exc_info[2])]
    return "orbax" not in " ".join([record.pathname, record.getMessage(), *files])


def check_creatable(folder: Path, step: int) -> None:
    """Raises OSError where Orbax could not create the folder of a step, with a small file in it.

    Its threads would wait five minutes for that folder, and end with warnings.
    """
    probe = folder / f"{step}.orbax-checkpoint-tmp"
    if probe.exists():  # of a save that failed
        shutil.rmtree(probe)
    probe.mkdir(parents=True)
    (probe / "probe").write_bytes(bytes(4096))
    shutil.rmtree(probe)


def start_saving(
    checkpointer: Any,
    path: Path,
    arrays: Mapping[str, jax.Array],
    record: Mapping[str, str],
) -> None:
    """Starts a save; returns once the arrays are copied and may be donated or deleted."""
    args = orbax().args
    stored = {name: x for name, x in arrays.items() if x.size}  # Orbax does not store empty ones
    items = args.Composite(
        **{ARRAYS: args.PyTreeSave(stored), "record": args.JsonSave(dict(record))}
    )
    checkpointer.save(path.absolute(), args=items)


def read_arrays(path: Path, target: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads the named arrays of a step's folder onto the shardings of the target.

    TensorStore reads what Orbax wrote (zarr in OCDBT): only the shards that this process needs,
    without waiting for other processes. Orbax's own reader leaves tasks behind when a file is
    damaged, which print tracebacks when they are garbage collected.

    Raises TensorStore's errors for a damaged folder. Damage that it misses shows in the digests.
    """
    ts = import_untyped("tensorstore")
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

    stored = [name for name, like in target.items() if like.size]
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        arrays = pool.map(with_settings_of_this_thread(read), stored)
        arrays = dict(zip(stored, arrays, strict=True))
    empty = {n: x for n, x in target.items() if not x.size}
    return arrays | {n: jnp.zeros(x.shape, x.dtype, device=x.sharding) for n, x in empty.items()}
