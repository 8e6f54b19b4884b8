"""Linear and embedding layers with quantized weights: integers and their scales.

A layer holds a quantized matrix, which knows its own format; the layer itself is the same for all
formats. They are made of float layers by `jaxllm.models.quantize`, and only for inference.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.platform import times_int8_transposed
from jaxllm.parallel.sharding import all_gather_fsdp


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
        return (rows * scale[..., None]).astype(dtype)

    def dequantized(self) -> Float[Array, "O I"]:
        return self.values[...] * self.scale[...][:, None]


class QuantizedLinear(Linear):
    """Linear layer ``y = x W^T + b`` with a quantized W; b is as in the float layer."""

    def __init__(self, matrix: QuantizedMatrix, base: Linear):
        self.matrix = matrix
        self.bias = None if base.bias is None else nnx.Param(base.bias[...])
        self.dtype = base.dtype

    def __call__(
        self, x: Float[Array, "... I"], key: jax.Array | None = None
    ) -> Float[Array, "... O"]:
        y = self.matrix.times(x.astype(self.dtype))
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class QuantizedEmbedding(Embedding):
    """Token embedding with a quantized matrix, also as LM head."""

    def __init__(self, matrix: QuantizedMatrix, base: Embedding):
        self.matrix = matrix
        self.dtype = base.dtype

    @property
    def features(self) -> int:
        return self.matrix.shape[1]

    def __call__(self, ids: Int[Array, ...]) -> Float[Array, "... D"]:
        return self.matrix.rows(ids, self.dtype)

    def attend(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return self.matrix.times(x.astype(self.dtype))
