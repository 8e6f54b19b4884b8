"""Writes safetensors: every file is read back and compared before it gets its final name.

The bytes are those of the safetensors package's ``save_file`` for the same tensors. That function
is not used: its numpy version (0.8.0) writes wrong data for transposed, sliced and broadcast arrays
(huggingface/safetensors#825) and needs a second copy of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxllm.checkpoint.safetensors.header import check_names, layout
from jaxllm.checkpoint.safetensors.reader import INDEX, SINGLE, SafetensorsFile
from jaxllm.common.errors import CheckpointError, MissingFileError, naming_file
from jaxllm.common.files import replacing, write_json

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")

PT_METADATA = {"format": "pt"}  # required by transformers

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]


def write_safetensors(
    path: str | PathLike[str], tensors: Tensors, metadata: Mapping[str, str] = PT_METADATA
) -> None:
    """Writes arrays (numpy, or JAX arrays on any device) to one safetensors file, atomically.

    The file is written beside ``path`` under a temporary name, read back and compared with the
    arrays bit by bit, flushed to disk and renamed; a failure leaves the file at ``path`` unchanged.
    Needs memory for one contiguous tensor besides the arrays.

    Args:
        path: the file to create or replace; its folder must exist.
        tensors: names and arrays, of any strides.
        metadata: the header's ``__metadata__``.

    Raises:
        MissingFileError: the folder does not exist.
        UnsupportedError: the format has no such dtype.
        CheckpointError: two tensors share a name, the disk is full, or a tensor read back differs.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise MissingFileError(f"{path.parent}: no such folder to write {path.name} in")
    arrays = _as_dict(tensors)
    with naming_file(path, CheckpointError, "written"), replacing(path) as partial:
        _write(partial, arrays, metadata)
        _compare(partial, arrays, path)


def write_sharded(
    folder: str | PathLike[str], tensors: Tensors, max_shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Writes a checkpoint in transformers' layout: one file, or shards with an index.

    Up to ``max_shard_bytes`` of tensors become ``model.safetensors``; more become
    ``model-00001-of-0000N.safetensors`` ... and ``model.safetensors.index.json``. Tensors fill the
    shards in the given order; one that is larger than a shard gets its own. Weight files of an
    earlier save are removed at the end.

    Returns:
        The weight files, without the index.
    """
    folder = Path(folder)
    arrays = _as_dict(tensors)
    shards = _split(arrays, max_shard_bytes)
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    new_names = set(names)
    if len(shards) > 1:
        new_names.add(INDEX)
        weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(_nbytes(array) for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    for old in folder.iterdir():
        if old.name not in new_names and (old.name == INDEX or _WEIGHT_FILE.fullmatch(old.name)):
            old.unlink()
    return [folder / name for name in names]


def _as_dict(tensors: Tensors) -> dict[str, Any]:
    if isinstance(tensors, Mapping):
        tensors = cast("Mapping[str, Any]", tensors).items()
    pairs = list(tensors)
    check_names(name for name, _ in pairs)
    return dict(pairs)


def _split(arrays: dict[str, Any], max_bytes: int) -> list[dict[str, Any]]:
    """The greedy split of huggingface_hub's ``split_state_dict_into_shards_factory``."""
    shards: list[dict[str, Any]] = []
    current: dict[str, Any] = {}
    size = 0
    for name, array in arrays.items():
        nbytes = _nbytes(array)
        if nbytes > max_bytes:
            shards.append({name: array})
            continue
        if current and size + nbytes > max_bytes:
            shards.append(current)
            current, size = {}, 0
        current[name] = array
        size += nbytes
    if current or not shards:
        shards.append(current)
    return shards


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def _contiguous(array: object) -> np.ndarray:
    """The array's bytes in C order, flat (``ascontiguousarray`` makes a scalar one-dimensional)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _write(path: Path, arrays: dict[str, Any], metadata: Mapping[str, str]) -> None:
    header, entries = layout(arrays, metadata)
    with path.open("wb") as file:
        file.write(header)
        for name, _ in entries:
            file.write(_contiguous(arrays[name]).data)


def _compare(partial: Path, arrays: dict[str, Any], path: Path) -> None:
    with SafetensorsFile(partial) as written:
        if set(written.names()) != arrays.keys():
            raise CheckpointError(f"{path}: the tensor names differ when read back")
        for name, array in arrays.items():
            info = written.info(name)
            same = info.shape == tuple(array.shape) and info.dtype == np.dtype(array.dtype)
            if not same or not np.array_equal(_contiguous(written.read(name)), _contiguous(array)):
                raise CheckpointError(
                    f"{path}: tensor {name!r} differs when read back; is the disk sound?"
                )
