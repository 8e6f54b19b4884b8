"""Linear and embedding layers with quantized weights: integers and their scales.

A layer holds a quantized matrix, which knows its own format; the layer itself is the same for all
formats. They are made of float layers by `jaxllm.models.quantize`, and only for inference.
"""

from __future__ import annotations

import math
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int4, Int8, Integer

from jaxllm.nn.experts import ExpertLinear
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.platform.products import (
    apply_to_rows,
    as_int8,
    dequantized_blocks,
    times_blocks_transposed,
    times_int4_transposed,
    times_int8_transposed,
)
from jaxllm.parallel.sharding import all_gather_fsdp

GROUP_SIZE = 32
"""Entries of a row that share a multiplier in `Int4Matrix`: docs/decisions/quantized-products.md"""
MAX_MULTIPLIER = 15


class QuantizedMatrix(Protocol):
    """A matrix [out, in] in integers and scales: its products and its rows."""

    format: str
    """Name of the format, such as "int8"."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        ...

    def times(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """``x W^T`` in x's dtype."""
        ...

    def rows(self, ids: Int[Array, ...], dtype: DTypeLike) -> Float[Array, "... I"]:
        """Rows of the matrix: token embeddings."""
        ...

    def dequantized(self) -> Float[Array, "O I"]:
        """The matrix in float32."""
        ...


class Int8Matrix(nnx.Module):
    """A matrix of int8 with a float32 scale for each row: ``W[o, i] = scale[o] * values[o, i]``."""

    format = "int8"

    def __init__(self, values: Int8[Array, "O I"], scale: Float[Array, " O"]):
        self.values, self.scale = nnx.Param(values), nnx.Param(scale)

    @classmethod
    def quantize(cls, weight: Float[Array, "O I"]) -> Int8Matrix:
        """The nearest matrix of this format; the largest entry of a row becomes 127."""
        weight = weight.astype(jnp.float32)
        scale = jnp.max(jnp.abs(weight), axis=1) / 127
        values = jnp.round(weight / jnp.where(scale > 0, scale, 1)[:, None])
        return cls(values.astype(jnp.int8), scale)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def times(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return times_int8_transposed(x, self.values[...], self.scale[...])

    def rows(self, ids: Int[Array, ...], dtype: DTypeLike) -> Float[Array, "... I"]:
        values = all_gather_fsdp(self.values[...], "vocab", "embed")
        scale = jnp.take(self.scale[...], ids, mode="clip")
        rows = jnp.take(values, ids, axis=0, mode="clip")
        return (rows.astype(scale.dtype) * scale[..., None]).astype(dtype)

    def dequantized(self) -> Float[Array, "O I"]:
        scale = self.scale[...][:, None]
        return self.values[...].astype(scale.dtype) * scale


class GroupedMatrix(nnx.Module):
    """Base of matrices whose rows are split into groups: ``groups`` is [G, O, S]."""

    groups: nnx.Param[Integer[Array, "G O S"]]

    @property
    def shape(self) -> tuple[int, int]:
        count, rows, size = self.groups.shape
        return rows, count * size


class Int4Matrix(GroupedMatrix):
    """A matrix of int4, with an integer multiplier for each group of a row and a float32 scale for
    each row: ``W[o, g * size + j] = scale[o] * multipliers[g, o] * groups[g, o, j]``.

    Multipliers are at most 15, so that ``multipliers * groups`` is a matrix of int8.
    """

    format = "int4"

    def __init__(
        self,
        groups: Int4[Array, "G O S"],
        multipliers: Int8[Array, "G O"],
        scale: Float[Array, " O"],
    ):
        self.groups, self.multipliers = nnx.Param(groups), nnx.Param(multipliers)
        self.scale = nnx.Param(scale)

    @classmethod
    def quantize(cls, weight: Float[Array, "O I"], group_size: int = GROUP_SIZE) -> Int4Matrix:
        """A near matrix of this format: of three multipliers of a group the one with the least
        squared error. Groups have the largest common divisor of `group_size` and the row's length.
        """
        rows, columns = weight.shape
        size = math.gcd(columns, group_size)
        weight = weight.astype(jnp.float32)
        scale = jnp.max(jnp.abs(weight), axis=1) / (8 * MAX_MULTIPLIER)
        units = weight / jnp.where(scale > 0, scale, 1)[:, None]
        units = units.reshape(rows, columns // size, size).transpose(1, 0, 2)
        # The largest entry of a group becomes -8, the end of int4's range that is farther from 0.
        largest = jnp.argmax(jnp.abs(units), axis=2, keepdims=True)
        exact = -jnp.take_along_axis(units, largest, axis=2) / 8
        sign = jnp.where(exact < 0, -1, 1)

        def rounded(smaller: int) -> tuple[Array, Array, Array]:
            multiplier = sign * jnp.clip(jnp.ceil(jnp.abs(exact)) - smaller, 1, MAX_MULTIPLIER)
            values = jnp.clip(jnp.round(units / multiplier), -8, 7)
            error = jnp.sum((units - multiplier * values) ** 2, axis=2, keepdims=True)
            return error, multiplier, values

        best = rounded(0)
        for smaller in (1, 2):
            other = rounded(smaller)
            better = other[0] < best[0]
            best = tuple(jnp.where(better, x, y) for x, y in zip(other, best, strict=True))
        _, multipliers, values = best
        return cls(values.astype(jnp.int4), multipliers[..., 0].astype(jnp.int8), scale)

    def times(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return times_int4_transposed(x, self.groups[...], self.multipliers[...], self.scale[...])

    def rows(self, ids: Int[Array, ...], dtype: DTypeLike) -> Float[Array, "... I"]:
        flat = ids.reshape(-1)
        groups, multipliers = (
            jnp.take(x[...], flat, axis=1, mode="clip") for x in (self.groups, self.multipliers)
        )
        scale = jnp.take(self.scale[...], flat, mode="clip")
        rows = as_int8(groups, multipliers).astype(scale.dtype) * scale[:, None]
        return rows.reshape(*ids.shape, -1).astype(dtype)

    def dequantized(self) -> Float[Array, "O I"]:
        values, scale = as_int8(self.groups[...], self.multipliers[...]), self.scale[...]
        return values.astype(scale.dtype) * scale[:, None]


class BlockMatrix(GroupedMatrix):
    """A matrix in groups with float scales and offsets, as in GGUF files:
    ``W[o, g * size + j] = scales[g, o] * groups[g, o, j] + offsets[g, o]``."""

    def __init__(
        self,
        name: str,
        groups: Integer[Array, "G O S"],
        scales: Float[Array, "G O"],
        offsets: Float[Array, "G O"] | None = None,
    ):
        self.format = name
        self.groups, self.scales = nnx.Param(groups), nnx.Param(scales)
        self.offsets = None if offsets is None else nnx.Param(offsets)

    def times(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        offsets = None if self.offsets is None else self.offsets[...]
        return times_blocks_transposed(x, self.groups[...], self.scales[...], offsets)

    def rows(self, ids: Int[Array, ...], dtype: DTypeLike) -> Float[Array, "... I"]:
        flat = ids.reshape(-1)
        groups, scales = (
            jnp.take(x[...], flat, axis=1, mode="clip") for x in (self.groups, self.scales)
        )
        offsets = None
        if self.offsets is not None:
            offsets = jnp.take(self.offsets[...], flat, axis=1, mode="clip")
        rows = dequantized_blocks(groups, scales, offsets)
        return rows.reshape(*ids.shape, -1).astype(dtype)

    def dequantized(self) -> Float[Array, "O I"]:
        offsets = None if self.offsets is None else self.offsets[...]
        return dequantized_blocks(self.groups[...], self.scales[...], offsets)


class QuantizedLinear(Linear):
    """Linear layer ``y = x W^T + b`` with a quantized W; b is as in the float layer."""

    def __init__(self, matrix: QuantizedMatrix, base: Linear):
        self.matrix = matrix
        self.bias = base.bias  # shared, also where it is the shape of an array
        self.dtype, self.axes = base.dtype, base.axes

    def product(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        return self.matrix.times(x)


class QuantizedExpertLinear(ExpertLinear):
    """Linear layer of all experts with quantized weights, each matrix by itself."""

    def __init__(self, matrix: QuantizedMatrix, base: ExpertLinear):
        self.matrix, self.dtype = matrix, base.dtype

    @property
    def matrices(self) -> QuantizedMatrix:
        return self.matrix


class QuantizedEmbedding(Embedding):
    """Token embedding with a quantized matrix, also as LM head."""

    def __init__(self, matrix: QuantizedMatrix, base: Embedding):
        self.matrix = matrix
        self.dtype, self.scale = base.dtype, base.scale

    @property
    def features(self) -> int:
        return self.matrix.shape[1]

    def __call__(self, ids: Int[Array, ...]) -> Float[Array, "... D"]:
        if ids.ndim != 2 or ids.shape[1] != 1:
            return self.scaled(self.matrix.rows(ids, self.dtype))
        # PERF(tpu): a lookup of one row needs another layout, into which XLA copies the matrix in
        # every step.
        rows = apply_to_rows(lambda ids: self.matrix.rows(ids[:, 0], self.dtype), ids)
        return self.scaled(rows[:, None])

    def attend(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return self.matrix.times(x.astype(self.dtype))
