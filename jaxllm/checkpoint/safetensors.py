"""Reads one safetensors file, and writes one file or several shards with their index.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of little-endian length,
that many bytes of JSON, then the tensors' bytes. The header maps each name to its dtype, shape and
begin and end within the data; ``__metadata__`` maps strings to strings. This reader also refuses
duplicate keys and unknown fields, which the safetensors package accepts.

Tensors are views of a read-only memory map: opening a checkpoint reads its headers only, and a
tensor's bytes are read on access.

Every written file is read back and compared before it gets its final name. The bytes are those of
the safetensors package's ``save_file`` for the same tensors. That function is not used: its numpy
version (0.8.0) writes wrong data for transposed, sliced and broadcast arrays
(huggingface/safetensors#825) and needs a second copy of the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.source import (
    BFLOAT16,
    Index,
    MappedFile,
    StoredTensor,
    copy_in_blocks,
    find_tensor,
)
from jaxllm.common.arguments import checked
from jaxllm.common.errors import (
    CheckpointError,
    InputError,
    MissingFileError,
    UnsupportedError,
    naming_file,
    quoted,
)
from jaxllm.common.files import parse_json, replacing, write_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
PT_METADATA = {"format": "pt"}  # required by transformers

# The reference accepts 100 MB. JSON grows up to 24-fold as Python objects, so 16 MiB keep a hostile
# header under half a gigabyte; the largest real ones (thousands of tensors) are below one megabyte.
MAX_HEADER_BYTES = 16 << 20

# In the order in which the safetensors package sorts a file's tensors.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}

# Dtypes of the format that jaxllm does not compute in.
_UNSUPPORTED = re.compile("C64|F4|F6_E2M3|F6_E3M2|F8_(E8M0|E4M3|E4M3FNUZ|E5M2|E5M2FNUZ)")

_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIMS = 64  # numpy's own limit
_BLOCK_BYTES = 16 << 20
_METADATA = "__metadata__"


def parse_header(
    data: bytes, *, source: str, start: int, data_bytes: int
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Checks the JSON of a header against the ``data_bytes`` that follow it, from ``start`` on.

    Returns:
        The tensors in the order of the file, and the metadata.
    """
    if not data.startswith(b"{"):
        raise CheckpointError(f"{source}: not a safetensors file (the header is no JSON object)")
    header = parse_json(data, source=source, max_depth=4, error=CheckpointError)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{source}: {_METADATA} must map strings to strings")

    entries = {name: _entry(name, fields, source, data_bytes) for name, fields in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    expected = 0
    for name, entry in ordered.items():
        if entry.begin != expected:
            problem = "overlaps the tensor before it" if entry.begin < expected else "leaves a gap"
            raise CheckpointError(
                f"{source}: tensor {quoted(name)} {problem}: it begins at byte {entry.begin}, "
                f"not at {expected}"
            )
        expected = entry.end
    if expected != data_bytes:
        raise CheckpointError(f"{source}: {data_bytes - expected} bytes follow the last tensor")
    placed = {n: replace(x, begin=start + x.begin, end=start + x.end) for n, x in ordered.items()}
    return placed, metadata


def _entry(name: str, fields: object, source: str, data_bytes: int) -> StoredTensor:
    """The tensor, whose bytes are counted from the first byte of the data."""
    where = f"{source}: tensor {quoted(name)}"
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        if isinstance(code, str) and _UNSUPPORTED.fullmatch(code):
            raise UnsupportedError(
                f"{where} has dtype {code}, which jaxllm does not read: convert it to BF16 first"
            )
        raise CheckpointError(f"{where} has the unknown dtype {quoted(code)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise CheckpointError(f"{where}: shape must be at most {_MAX_DIMS} non-negative integers")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be [begin, end] with begin <= end")
    if offsets[1] > data_bytes:
        raise CheckpointError(
            f"{where} ends at byte {quoted(offsets[1])} of the data, which has {data_bytes} "
            "(an incomplete download?)"
        )
    dtype = DTYPES[code]
    begin, end = offsets
    if math.prod(shape) * dtype.itemsize != end - begin:
        raise CheckpointError(
            f"{where}: {code} of shape {quoted(shape)} does not take the {end - begin} bytes "
            "that data_offsets say"
        )
    # numpy multiplies the other dimensions of an empty array too, and must not overflow.
    if math.prod(size for size in shape if size) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{where}: shape {quoted(shape)} is too large")
    return StoredTensor(tuple(shape), dtype, begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


class SafetensorsFile(MappedFile):
    """One ``.safetensors`` file; opening it reads and checks the header."""

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(Path(path))
        if self.size < 8:
            raise CheckpointError(
                f"{self.path}: {self.size} bytes are too few for a safetensors file"
            )
        length = int.from_bytes(self.head(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: not a safetensors file, or one with a header of {length} bytes; "
                f"at most {MAX_HEADER_BYTES} are read"
            )
        start = 8 + length
        if start > self.size:
            raise CheckpointError(f"{self.path}: ends within its header (an incomplete download?)")
        data = bytes(self.head(start)[8:])
        self.tensors, self.metadata = parse_header(
            data, source=str(self.path), start=start, data_bytes=self.size - start
        )

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        entry: StoredTensor = find_tensor(self.tensors, name, self.path)
        if entry.dtype == np.bool_:
            values = self.array(np.dtype(np.uint8), entry.begin, entry.shape)
            if values.max(initial=0) > 1:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)}: a BOOL is neither 0 nor 1"
                )
        return self.array(entry.dtype, entry.begin, entry.shape, index)

    def holds(self, name: str, blocks: Iterable[np.ndarray]) -> bool:
        """True if a tensor's bytes equal the blocks, joined in their order.

        The file is read, not mapped, so that the tensor's pages take no memory.
        """
        begin, end = self.tensors[name].begin, self.tensors[name].end
        with self.path.open("rb") as file:
            file.seek(begin)
            for block in blocks:
                if not np.array_equal(np.fromfile(file, np.uint8, len(block)), block):
                    return False
                begin += len(block)
        return begin == end


def write_safetensors(
    path: str | PathLike[str],
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] = PT_METADATA,
) -> None:
    """Writes tensors to one safetensors file, atomically.

    The file is written beside ``path`` under a temporary name, read back and compared with the
    arrays bit by bit, flushed to disk and renamed; a failure leaves the file at ``path`` unchanged.
    Needs memory for one tensor, as numpy gets it of the array, besides the arrays.

    Args:
        path: the file to create or replace; its folder must exist.
        tensors: numpy arrays of any strides, or JAX arrays on any device, by name.
        metadata: the header's ``__metadata__``.
    """
    path = Path(path)
    checked(tensors, (Mapping,), "tensors", "a dict of arrays by name")
    if not path.parent.is_dir():
        raise MissingFileError(f"{path.parent}: no such folder to write {path.name} in")
    with naming_file(path, CheckpointError, "written"), replacing(path) as partial:
        header, names = _layout(tensors, metadata)
        with partial.open("wb") as file:
            file.write(header)
            for name in names:
                for block in _blocks(tensors[name]):
                    file.write(block.data)
        _compare(partial, tensors, path)


def write_sharded(
    folder: str | PathLike[str], tensors: Mapping[str, Any], max_shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Writes a checkpoint in transformers' layout: one file, or shards with an index.

    Up to ``max_shard_bytes`` of tensors become ``model.safetensors``; more become
    ``model-00001-of-0000N.safetensors`` ... and ``model.safetensors.index.json``. Tensors fill the
    shards in the given order; one that is larger than a shard gets its own. Weight files of an
    earlier save are removed at the end.

    Returns:
        The weight files, without the index.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # a slow import

    folder = Path(folder)
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=_nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    shards = split.filename_to_tensors or {SINGLE: []}
    for name, held in shards.items():
        write_safetensors(folder / name, {tensor: tensors[tensor] for tensor in held})
    new_names = set(shards)
    if split.is_sharded:
        new_names.add(INDEX)
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)
    for old in folder.iterdir():
        if old.name not in new_names and (old.name == INDEX or _WEIGHT_FILE.fullmatch(old.name)):
            old.unlink()
    return [folder / name for name in shards]


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def _blocks(array: Any) -> Iterator[np.ndarray]:
    """The array's bytes in C order, in pieces of rows of at most `_BLOCK_BYTES` where that is
    possible, so that a transposed array is not copied whole."""
    values = np.asarray(array)
    rows = values if values.ndim else values.reshape(1)
    count = max(1, _BLOCK_BYTES * max(1, len(rows)) // max(1, values.nbytes))
    for start in range(0, len(rows), count):
        block = rows[start : start + count]
        if not block.flags.c_contiguous:
            copy = np.empty(block.shape, block.dtype)
            copy_in_blocks(copy, block)
            block = copy
        yield block.reshape(-1).view(np.uint8)


def _layout(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The header's bytes, and the names in the file's order.

    Tensors are sorted by dtype and then by name, as the safetensors package does, and the header is
    padded to a multiple of 8, so that the same tensors always give the same file.
    """
    codes: dict[str, str] = {}
    for name, array in arrays.items():
        if not isinstance(name, str) or name == _METADATA:
            raise CheckpointError(f"{name!r} cannot be the name of a tensor")
        if not (hasattr(array, "dtype") and hasattr(array, "shape")):
            raise InputError(f"tensor {quoted(name)}: expected an array, found {quoted(array)}")
        code = _CODES.get(array.dtype)
        if code is None:
            raise UnsupportedError(f"tensor {quoted(name)}: safetensors cannot hold {array.dtype}")
        codes[name] = code
    ranks = {code: -rank for rank, code in enumerate(DTYPES)}
    names = sorted(arrays, key=lambda name: (ranks[codes[name]], name))
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for name in names:
        end = begin + _nbytes(arrays[name])
        shape = [int(size) for size in arrays[name].shape]
        header[name] = {"dtype": codes[name], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def _compare(partial: Path, arrays: Mapping[str, Any], path: Path) -> None:
    with SafetensorsFile(partial) as written:
        if set(written.names()) != arrays.keys():
            raise CheckpointError(f"{path}: the tensor names differ when read back")
        for name, array in arrays.items():
            info = written.info(name)
            same = info.shape == tuple(array.shape) and info.dtype == np.dtype(array.dtype)
            if not same or not written.holds(name, _blocks(array)):
                raise CheckpointError(
                    f"{path}: tensor {name!r} differs when read back; is the disk sound?"
                )
