"""Blocks of GGUF's quantized types as integers, scales and offsets, without dequantizing them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from jaxllm.models.quantize import BLOCK_FORMATS


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A matrix [O, I] in groups of a row's entries: ``scales * values + offsets``."""

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


def unpack(data: np.ndarray, rows: int, ggml_type: GGMLQuantizationType) -> Blocks:
    """Unpacks the bytes of a matrix; its dequantized values are those of the gguf package.

    Args:
        data: the tensor's bytes, uint8.
        rows: number of rows; a row is a whole number of blocks.
        ggml_type: one of `BLOCK_FORMATS`.
    """
    blocks = data.reshape(-1, GGML_QUANT_SIZES[ggml_type][1])
    values, scales, offsets = _PARTS[ggml_type](blocks)
    name = ggml_type.name
    form = BLOCK_FORMATS[name]

    def grouped(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, form.scales).reshape(rows, -1)

    return Blocks(
        name,
        values.reshape(rows, -1, form.size),
        grouped(scales),
        None if offsets is None else grouped(offsets),
    )


Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _half(blocks: np.ndarray, begin: int) -> np.ndarray:
    """The float16 at byte `begin` of each block."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16)


def _nibbles(data: np.ndarray, width: int) -> np.ndarray:
    """Numbers of 4 bits: of each `width` bytes first the lower halves, then the upper ones."""
    data = data.reshape(len(data), -1, 1, width)
    return np.concatenate([data & 15, data >> 4], axis=2).astype(np.int8)


def _q8_0(blocks: np.ndarray) -> Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks[:, 2:], 16) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: np.ndarray) -> Parts:
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
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
