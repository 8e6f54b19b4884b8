"""Reads GGUF files, llama.cpp's weight format: metadata, and tensors as arrays or as blocks.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The
header is parsed here, strictly: nothing is allocated before the bytes that fill it are known to be
in the file, sizes are Python integers (no overflow), and ambiguous headers (repeated keys,
overlapping tensors) are rejected. The reader of the ``gguf`` package hangs or runs out of memory on
hostile headers, and is slow on valid ones; its tables of block sizes are used, and its arithmetic
for the types that models do not compute in.

Tensors keep llama.cpp's names and layout; :mod:`jaxllm.checkpoint.gguf.names` converts them to
Hugging Face's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.checkpoint.source import (
    BFLOAT16,
    Index,
    MappedFile,
    StoredTensor,
    aligned_empty,
    find_tensor,
)
from jaxllm.common.errors import CheckpointError, UnsupportedError, quoted
from jaxllm.models.quantize import BLOCK_FORMATS

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType  # slow; the functions below import it

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

_STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
}
_OTHER_TYPES = (
    *("Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q5_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
)
"""Types that the gguf package dequantizes, beside `BLOCK_FORMATS`."""
_CHUNK = 1 << 12  # blocks that are dequantized at a time
_CHUNK_VALUES = 1 << 17  # values that the gguf package dequantizes at a time


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """One tensor, with its ggml type; its shape is in numpy's order."""

    type: GGMLQuantizationType


class GGUFFile(MappedFile):
    """One ``.gguf`` file.

    ``read`` returns float32 for quantized types; F32, F16 and BF16 are returned without conversion
    or copy. Shapes are in numpy's order, ``[out, in]`` for a linear layer; GGUF stores the
    dimensions in reverse.

    Attributes:
        metadata: the key-value fields: int, float, bool, str, list[str], or a numpy array.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(Path(path))
        self.metadata, self.tensors = parse_header(
            self.head(MAX_HEADER_BYTES), source=str(self.path), file_bytes=self.size
        )

    def quantization(self, name: str) -> str:
        """Name of a tensor's ggml type, such as ``"Q4_K"``."""
        return find_tensor(self.tensors, name, self.path).type.name

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor or a slice of it; see the class for its dtype.

        For a quantized matrix only the rows in `index` are dequantized: a row is a whole number of
        blocks. A tensor of another quantized type raises UnsupportedError.
        """
        entry: GGUFTensor = find_tensor(self.tensors, name, self.path)
        if entry.type.name in _STORED:
            return self.array(entry.dtype, entry.begin, entry.shape, index)
        if entry.type.name not in (*BLOCK_FORMATS, *_OTHER_TYPES):
            readable = ", ".join((*_STORED, *BLOCK_FORMATS, *_OTHER_TYPES))
            raise UnsupportedError(
                f"{self.path}: tensor {quoted(name)} has the type {entry.type.name}; jaxllm reads "
                f"{readable}: use a file with one of these types"
            )
        data = self._bytes(entry)
        if not index or len(entry.shape) < 2:
            whole = _dequantize(data, entry.shape, entry.type)
            return whole[index] if index else whole
        first, stop, _ = index[0].indices(entry.shape[0])
        per_row, rows = data.size // entry.shape[0], max(stop - first, 0)
        data = data[first * per_row : (first + rows) * per_row]
        part = _dequantize(data, (rows, *entry.shape[1:]), entry.type)
        return part[(slice(None), *index[1:])]

    def blocks(self, name: str, index: Index = ()) -> Blocks | None:
        """The blocks of a quantized matrix, or of a stack of matrices, without dequantizing them;
        None for other tensors.

        With `index` of a slice, whose columns are whole groups: only the blocks in it are read.
        """
        from gguf.constants import GGML_QUANT_SIZES

        entry: GGUFTensor = find_tensor(self.tensors, name, self.path)
        form = BLOCK_FORMATS.get(entry.type.name)
        if form is None or len(entry.shape) < 2:
            return None
        block, block_bytes = GGML_QUANT_SIZES[entry.type]
        *leading, columns = entry.shape
        index = (*index, *[slice(None)] * (len(entry.shape) - len(index)))
        start, stop, _ = index[-1].indices(columns)
        first = start // block
        data = self._bytes(entry).reshape(*leading, columns // block, block_bytes)
        blocks = unpack(data[(*index[:-1], slice(first, -(-stop // block)))], entry.type)
        skipped = (start - first * block) // form.size
        groups = slice(skipped, skipped + (stop - start) // form.size)
        return blocks.map(lambda x: x[(*[slice(None)] * len(leading), groups)])

    def _bytes(self, entry: GGUFTensor) -> np.ndarray:
        return self.array(np.dtype(np.uint8), entry.begin, (entry.end - entry.begin,))


def _dequantize(
    data: np.ndarray, shape: tuple[int, ...], ggml_type: GGMLQuantizationType
) -> np.ndarray:
    """Dequantizes blocks into a float32 array of this shape, as many as fit into the CPU's cache
    at a time."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    blocks = data.reshape(-1, block_bytes)
    result = aligned_empty(shape, np.dtype(np.float32))
    if ggml_type.name in _OTHER_TYPES:
        values, count = result.reshape(-1), max(1, _CHUNK_VALUES // block)
        with np.errstate(all="ignore"):
            for start in range(0, len(blocks), count):
                # As one row: the package splits many rows into groups of 16.
                row = blocks[start : start + count].reshape(1, -1)
                values[start * block : (start + count) * block] = dequantize(row, ggml_type)[0]
        return result
    size = BLOCK_FORMATS[ggml_type.name].size
    per_block = block // size
    groups = result.reshape(len(blocks) * per_block, size)
    with np.errstate(all="ignore"):  # the loader reports NaN and infinite scales
        for start in range(0, len(blocks), _CHUNK):
            values, scales, offsets = _PARTS[ggml_type.name](blocks[start : start + _CHUNK])
            part = groups[start * per_block : (start + _CHUNK) * per_block]
            values = values.reshape(part.shape)
            np.multiply(values, scales.astype(np.float32).reshape(-1, 1), out=part)
            if offsets is not None:
                part += offsets.astype(np.float32).reshape(-1, 1)
    return result


def parse_header(
    data: memoryview, *, source: str, file_bytes: int
) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Reads the header at the start of ``data``: the first ``MAX_HEADER_BYTES`` or the whole file.

    Returns:
        The metadata (int, float, bool, str, list[str], or a numpy array for an array of numbers),
        and the tensors in the file's order.
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

    metadata: dict[str, Any] = {}
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
        where = f"{source}: tensor {quoted(name)}"
        if name in entries:
            raise CheckpointError(f"{source}: two tensors have the name {quoted(name)}")
        if offset % alignment:
            raise CheckpointError(f"{where}: offset {offset} is no multiple of {alignment}")
        entries[name] = _entry(where, type_id, shape, start + offset, file_bytes)
    _check_overlap(source, entries)
    return metadata, entries


def _entry(
    where: str, type_id: int, shape: tuple[int, ...], begin: int, file_bytes: int
) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

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
    end = begin + math.prod(shape) // block * block_bytes
    if end > file_bytes:
        raise CheckpointError(
            f"{where} ends at byte {end} of a file of {file_bytes} (an incomplete download?)"
        )
    dtype = _STORED.get(ggml_type.name, np.dtype(np.float32))
    return GGUFTensor(shape, dtype, begin, end, ggml_type)


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
            end = start + struct.unpack_from("<Q", data, position)[0] if start <= limit else start
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


@dataclass(frozen=True)
class Blocks:
    """A matrix [O, I] in groups of a row's entries, ``scales * values + offsets``, or a stack of
    matrices with an axis before the others."""

    format: str
    """Name of the ggml type: "Q8_0", "Q4_0", "Q4_1", "Q4_K" or "Q6_K"."""
    values: np.ndarray
    """int8 [O, G, S]."""
    scales: np.ndarray
    """[O, G], in the dtype of `BLOCK_FORMATS`."""
    offsets: np.ndarray | None
    """[O, G], or None."""

    def map(self, change: Any) -> Blocks:
        """The blocks with `change` applied to each array, such as another order of the rows."""
        offsets = None if self.offsets is None else change(self.offsets)
        return Blocks(self.format, change(self.values), change(self.scales), offsets)


def unpack(data: np.ndarray, ggml_type: GGMLQuantizationType) -> Blocks:
    """Unpacks the bytes of a matrix, or of a stack of matrices, to the same values as the gguf
    package.

    Args:
        data: the bytes [..., rows, blocks of a row, bytes of a block], uint8.
        ggml_type: one of `BLOCK_FORMATS`.
    """
    *leading, _, block_bytes = data.shape
    values, scales, offsets = _PARTS[ggml_type.name](data.reshape(-1, block_bytes))
    name = ggml_type.name
    form = BLOCK_FORMATS[name]

    def grouped(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, form.scales).reshape(*leading, -1)

    return Blocks(
        name,
        values.reshape(*leading, -1, form.size),
        grouped(scales),
        None if offsets is None else grouped(offsets),
    )


Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _half(blocks: np.ndarray, begin: int) -> np.ndarray:
    """The float16 at byte `begin` of each block."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16)


def _nibbles(data: np.ndarray, width: int) -> np.ndarray:
    """Numbers of 4 bits: of each `width` bytes first the lower halves, then the upper ones."""
    data = data.reshape(len(data), -1, width)
    halves = np.empty((*data.shape[:2], 2, width), np.uint8)
    np.bitwise_and(data, 15, out=halves[:, :, 0])
    np.right_shift(data, 4, out=halves[:, :, 1])
    return halves.view(np.int8)


def _q8_0(blocks: np.ndarray) -> Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks[:, 2:], 16) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: np.ndarray) -> Parts:
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    d, dmin = (_half(blocks, begin).astype(np.float32) for begin in (0, 2))
    return _nibbles(blocks[:, 16:], 32), d * scales, -(dmin * minima)


def _q6_k(blocks: np.ndarray) -> Parts:
    low = _nibbles(blocks[:, :128], 64).reshape(len(blocks), -1, 32)
    high = blocks[:, 128:192].reshape(len(blocks), -1, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    values = (low | (high.reshape(low.shape) << 4).astype(np.int8)) - np.int8(32)
    scales = _half(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return values, scales, None


_PARTS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
