"""Parses the header of a GGUF file: magic, counts, metadata, tensor list; checks every number.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Nothing
is allocated before the bytes that fill it are known to be in the file, sizes are Python integers
(no overflow), and ambiguous headers (repeated keys, overlapping tensors) are rejected.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.common.errors import CheckpointError, UnsupportedError, quoted

MAGIC = b"GGUF"
VERSIONS = (2, 3)

MAX_HEADER_BYTES = 64 << 20  # real ones, with a vocabulary of 260,000 tokens, take 20 MB
_MAX_ITEMS = 1 << 24  # bytes of a string, elements of an array
_MAX_COUNT = 1 << 20  # metadata fields, tensors
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

_LENGTH = struct.Struct("<Q")

Metadata = dict[str, Any]


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: ggml type, shape in numpy's order, and byte range in the file."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_header(
    data: memoryview, *, source: str, file_bytes: int
) -> tuple[Metadata, dict[str, GGUFTensor]]:
    """Reads the header at the start of ``data``: the first ``MAX_HEADER_BYTES`` or the whole file.

    Returns:
        The metadata (int, float, bool, str, list[str], or a numpy array for an array of numbers),
        and the tensors in the file's order.

    Raises:
        CheckpointError: the header is malformed or does not fit a file of ``file_bytes``.
        UnsupportedError: a big-endian file or another version.
    """
    reader = _Reader(data, source)
    if reader.take(4, "the magic number") != MAGIC:
        raise CheckpointError(f"{source}: not a GGUF file")
    version = reader.number("I", "the version")
    if version & 0xFFFF == 0:
        raise UnsupportedError(f"{source}: a big-endian GGUF file; convert it to little-endian")
    if version not in VERSIONS:
        raise UnsupportedError(f"{source}: GGUF version {version}; jaxllm reads {VERSIONS}")
    tensor_count = reader.count("the number of tensors")
    field_count = reader.count("the number of metadata fields")

    metadata: Metadata = {}
    for _ in range(field_count):
        key = reader.string("a metadata key")
        if key in metadata:
            raise CheckpointError(f"{source}: the metadata key {quoted(key)} appears twice")
        metadata[key] = reader.value(quoted(key))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointError(f"{source}: general.alignment must be a power of two")

    descriptions = [reader.tensor() for _ in range(tensor_count)]
    start = -(-reader.position // alignment) * alignment
    entries: dict[str, GGUFTensor] = {}
    for name, type_id, shape, offset in descriptions:
        if name in entries:
            raise CheckpointError(f"{source}: two tensors have the name {quoted(name)}")
        entries[name] = _entry(source, name, type_id, shape, start, offset, alignment, file_bytes)
    _check_overlap(source, entries)
    return metadata, entries


def _entry(
    source: str,
    name: str,
    type_id: int,
    shape: tuple[int, ...],
    start: int,
    offset: int,
    alignment: int,
    file_bytes: int,
) -> GGUFTensor:
    where = f"{source}: tensor {quoted(name)}"
    if type_id not in GGML_QUANT_SIZES:
        raise CheckpointError(f"{where} has the unknown ggml type {type_id}")
    ggml_type = GGMLQuantizationType(type_id)
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if 0 in shape:
        raise CheckpointError(f"{where} has an empty dimension: {shape}")
    if shape[-1] % block:
        raise CheckpointError(
            f"{where}: rows of {shape[-1]} values are no whole {ggml_type.name} blocks of {block}"
        )
    if offset % alignment:
        raise CheckpointError(f"{where}: offset {offset} is no multiple of {alignment}")
    begin = start + offset
    end = begin + math.prod(shape) // block * block_bytes
    if end > file_bytes:
        raise CheckpointError(
            f"{where} ends at byte {end} of a file of {file_bytes} (an incomplete download?)"
        )
    return GGUFTensor(ggml_type, shape, begin, end)


def _check_overlap(source: str, entries: dict[str, GGUFTensor]) -> None:
    previous, reached = "", 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        if entry.begin < reached:
            raise CheckpointError(
                f"{source}: the tensors {quoted(previous)} and {quoted(name)} overlap"
            )
        previous, reached = name, entry.end


class _Reader:
    """Cursor over the header's bytes; raises CheckpointError at their end."""

    def __init__(self, data: memoryview, source: str) -> None:
        self.data = data
        self.source = source
        self.position = 0

    def take(self, count: int, what: str) -> memoryview:
        end = self.position + count
        if end > len(self.data):
            raise CheckpointError(f"{self.source}: the header ends within {what}")
        data = self.data[self.position : end]
        self.position = end
        return data

    def number(self, code: str, what: str) -> int:
        size = 8 if code == "Q" else 4
        (value,) = struct.unpack(f"<{code}", self.take(size, what))
        return value

    def count(self, what: str, limit: int = _MAX_COUNT) -> int:
        value = self.number("Q", what)
        if value > limit:
            raise CheckpointError(f"{self.source}: {what} is {value}; at most {limit} are read")
        return value

    def string(self, what: str) -> str:
        data = self.take(self.count(f"the length of {what}", _MAX_ITEMS), what)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as failure:
            raise CheckpointError(
                f"{self.source}: {what} is not UTF-8: {bytes(data[:40])!r} (byte {failure.start})"
            ) from failure

    def value(self, what: str) -> Any:
        type_id = self.number("I", f"the type of {what}")
        if type_id == _STRING:
            return self.string(what)
        if type_id == _ARRAY:
            return self.array(what)
        return self.numbers(type_id, 1, what)[0].item()

    def array(self, what: str) -> list[str] | np.ndarray:
        type_id = self.number("I", f"the element type of {what}")
        if type_id == _ARRAY:
            raise CheckpointError(f"{self.source}: {what} is an array of arrays")
        length = self.count(f"the length of {what}", _MAX_ITEMS)
        if type_id == _STRING:
            return self.strings(length, f"an element of {what}")
        return self.numbers(type_id, length, what)

    def strings(self, length: int, what: str) -> list[str]:
        """Reads many strings, faster than one by one: a vocabulary has over 100,000."""
        data, position, limit = self.data, self.position, len(self.data)
        strings: list[str] = []
        for _ in range(length):
            start = position + 8
            end = start + _LENGTH.unpack_from(data, position)[0] if start <= limit else start
            try:
                if end > limit or end - start > _MAX_ITEMS:
                    break
                strings.append(str(data[start:end], "utf-8"))
            except UnicodeDecodeError:
                break
            position = end
        self.position = position
        if len(strings) < length:
            self.string(what)  # raises the error of the next one
        return strings

    def numbers(self, type_id: int, length: int, what: str) -> np.ndarray:
        dtype = _SCALARS.get(type_id)
        if dtype is None:
            raise CheckpointError(f"{self.source}: {what} has the unknown value type {type_id}")
        numbers = np.frombuffer(bytes(self.take(length * dtype.itemsize, what)), dtype)
        if type_id != _BOOL:
            return numbers
        if numbers.max(initial=0) > 1:
            raise CheckpointError(f"{self.source}: {what} is a boolean that is neither 0 nor 1")
        return numbers.astype(np.bool_)

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Reads name, ggml type, shape (in numpy's order, ggml's reversed) and data offset."""
        name = self.string("a tensor's name")
        what = f"the description of tensor {quoted(name)}"
        dims = self.number("I", what)
        if not 1 <= dims <= _MAX_DIMS:
            raise CheckpointError(
                f"{self.source}: tensor {quoted(name)} has {dims} dimensions, not 1 to {_MAX_DIMS}"
            )
        shape = tuple(self.number("Q", what) for _ in range(dims))[::-1]
        return name, self.number("I", what), shape, self.number("Q", what)
