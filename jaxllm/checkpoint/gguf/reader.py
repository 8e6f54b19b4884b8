"""Reads GGUF files, llama.cpp's weight format: metadata, and tensors as arrays.

The header is parsed by jaxllm's own strict parser; of the ``gguf`` package only ``dequantize`` is
used (its reader hangs or runs out of memory on hostile headers, and is slow on valid ones).
Tensors keep llama.cpp's names and layout; :mod:`jaxllm.checkpoint.gguf.names` converts them to
Hugging Face's.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from jaxllm.checkpoint.gguf.blocks import Blocks, unpack
from jaxllm.checkpoint.gguf.header import MAX_HEADER_BYTES, parse_header
from jaxllm.checkpoint.source import (
    BFLOAT16,
    Index,
    MappedFile,
    TensorInfo,
    WeightSource,
    find_tensor,
)
from jaxllm.common.errors import UnsupportedError, quoted

_STORED: dict[GGMLQuantizationType, np.dtype[Any]] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: BFLOAT16,
}
_QUANTISED = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
)
_FLOAT32 = np.dtype(np.float32)

# Values per call of `dequantize`, which needs several times the memory of its result; passed as one
# row, because it processes many rows 16 at a time, slowly. A multiple of every block size.
_CHUNK = 1 << 18


class GGUFFile(WeightSource):
    """One ``.gguf`` file.

    ``read`` returns float32 for the quantized types Q8_0, Q4_0, Q4_1, Q4_K and Q6_K; F32, F16 and
    BF16 are returned without conversion or copy. Shapes are in numpy's order, ``[out, in]`` for a
    linear layer; GGUF stores the dimensions in reverse.

    Attributes:
        path: the file.
        metadata: the key-value fields: int, float, bool, str, list[str], or a numpy array.

    Raises:
        MissingFileError: there is no such file.
        CheckpointError: the header is malformed or does not fit the file.
        UnsupportedError: a big-endian file or an unknown version.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        self.metadata, self._entries = parse_header(
            self._file.head(MAX_HEADER_BYTES), source=str(self.path), file_bytes=self._file.size
        )

    def names(self) -> list[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        entry = find_tensor(self._entries, name, self.path)
        dtype = _STORED.get(entry.type, _FLOAT32)
        return TensorInfo(entry.shape, dtype, entry.end - entry.begin, self.path)

    def quantization(self, name: str) -> str:
        """Name of a tensor's ggml type, such as ``"Q4_K"``."""
        return find_tensor(self._entries, name, self.path).type.name

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor or a slice of it; see the class for its dtype.

        For a quantized matrix only the rows in `index` are dequantized: a row is a whole number of
        blocks.

        Raises:
            CheckpointError: no tensor has this name, or the file is closed.
            UnsupportedError: the tensor has another quantized type.
        """
        entry = find_tensor(self._entries, name, self.path)
        size = entry.end - entry.begin
        stored = _STORED.get(entry.type)
        if stored is not None:
            return self._file.array(stored, entry.begin, entry.shape, index)
        if entry.type not in _QUANTISED:
            readable = ", ".join(t.name for t in (*_STORED, *_QUANTISED))
            raise UnsupportedError(
                f"{self.path}: tensor {quoted(name)} has the type {entry.type.name}; jaxllm reads "
                f"{readable}: use a file with one of these types"
            )
        data = self._file.view(np.dtype(np.uint8), entry.begin, size)
        if not index or len(entry.shape) < 2:
            whole = _dequantize(data, entry.shape, entry.type)
            return whole[index] if index else whole
        first, stop, _ = index[0].indices(entry.shape[0])
        per_row, rows = size // entry.shape[0], max(stop - first, 0)
        data = data[first * per_row : (first + rows) * per_row]
        part = _dequantize(data, (rows, *entry.shape[1:]), entry.type)
        return part[(slice(None), *index[1:])]

    def blocks(self, name: str) -> Blocks | None:
        """The blocks of a quantized matrix, without dequantizing them; None for other tensors."""
        entry = find_tensor(self._entries, name, self.path)
        if entry.type not in _QUANTISED or len(entry.shape) != 2:
            return None
        data = self._file.view(np.dtype(np.uint8), entry.begin, entry.end - entry.begin)
        return unpack(data, entry.shape[0], entry.type)

    def release_pages(self, name: str) -> None:
        entry = find_tensor(self._entries, name, self.path)
        self._file.release_pages(entry.begin, entry.end)

    def close(self) -> None:
        self._file.close()


def _dequantize(
    data: np.ndarray, shape: tuple[int, ...], ggml_type: GGMLQuantizationType
) -> np.ndarray:
    """Dequantizes blocks into a float32 array of this shape, a megabyte at a time."""
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    result = np.empty(shape, np.float32)
    flat = result.reshape(-1)
    with np.errstate(all="ignore"):  # the loader reports NaN and infinite scales
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            begin = start // block * block_bytes
            end = begin + part.size // block * block_bytes
            part[:] = dequantize(data[None, begin:end], ggml_type)[0]
    return result
