"""Parses and checks the header of a safetensors file, and lays it out for writing.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of little-endian length,
that many bytes of JSON, then the tensors' bytes. The header maps each name to its dtype, shape and
begin and end within the data; ``__metadata__`` maps strings to strings. This reader also refuses
duplicate keys and unknown fields, which the safetensors package accepts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.checkpoint.source import BFLOAT16
from jaxllm.common.errors import CheckpointError, UnsupportedError, quoted
from jaxllm.common.strict_json import parse_json

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
_RANKS = {code: rank for rank, code in enumerate(DTYPES)}

# Dtypes of the format that jaxllm does not compute in.
_UNSUPPORTED = {"C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2"} | {
    "F8_E5M2FNUZ",
    "F8_E8M0",
}

_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_DIMS = 64  # numpy's own limit
_METADATA = "__metadata__"


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a header; ``begin`` and ``end`` count from the first byte of the data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(
    data: bytes, *, source: str, data_bytes: int
) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Checks the JSON of a header against the ``data_bytes`` that follow it.

    Returns:
        The entries in the order of the file, and the metadata.

    Raises:
        CheckpointError: the tensors overlap, leave a gap, or do not fill the data.
        UnsupportedError: a tensor has a dtype of the format that jaxllm does not read (8-bit
            floats and smaller, complex numbers).
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
    return ordered, metadata


def _entry(name: str, fields: object, source: str, data_bytes: int) -> HeaderEntry:
    where = f"{source}: tensor {quoted(name)}"
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        if isinstance(code, str) and code in _UNSUPPORTED:
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
    return HeaderEntry(dtype, tuple(shape), begin, end)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def layout(
    tensors: Mapping[str, Any], metadata: Mapping[str, str]
) -> tuple[bytes, list[tuple[str, HeaderEntry]]]:
    """Header bytes and file order of arrays; only their ``dtype`` and ``shape`` are read.

    Tensors are sorted by dtype and then by name, as the safetensors package does, and the header is
    padded to a multiple of 8, so that the same tensors always give the same file.

    Raises:
        UnsupportedError: an array has a dtype that the format cannot hold.
    """
    coded: list[tuple[int, str, str]] = []
    for name, array in tensors.items():
        code = _CODES.get(np.dtype(array.dtype))
        if code is None:
            raise UnsupportedError(f"tensor {quoted(name)}: safetensors cannot hold {array.dtype}")
        coded.append((-_RANKS[code], name, code))

    entries: list[tuple[str, HeaderEntry]] = []
    described: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    begin = 0
    for _, name, code in sorted(coded):
        shape = tuple(int(size) for size in tensors[name].shape)
        end = begin + math.prod(shape) * DTYPES[code].itemsize
        entries.append((name, HeaderEntry(DTYPES[code], shape, begin, end)))
        described[name] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, entries


def check_names(names: Iterable[str]) -> None:
    """Raises CheckpointError for duplicate names, and names that a header cannot hold."""
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or name == _METADATA:
            raise CheckpointError(f"{name!r} cannot be the name of a tensor")
        if name in seen:
            raise CheckpointError(f"two tensors have the name {quoted(name)}")
        seen.add(name)
