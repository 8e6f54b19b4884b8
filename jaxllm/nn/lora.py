"""Linear with a trainable change of low rank: LoRA, rsLoRA and DoRA."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.nn.dropout import dropout
from jaxllm.nn.linear import Linear
from jaxllm.nn.platform import times_transposed


class LoraLinear(Linear):
    """A Linear whose weight is ``W + s B A``, with A [r, in] and B [out, r] to be trained.

    LoRA (Hu et al. 2021, arXiv:2106.09685) has ``s = alpha / r``, rsLoRA (Kalajdzievski 2023,
    arXiv:2312.03732) ``s = alpha / sqrt(r)``. With a magnitude [out] it is DoRA (Liu et al. 2024,
    arXiv:2402.09353): each row of the sum gets that length, and the row's own length counts as a
    constant in the gradient (their section 4.3). Only the change sees the dropout; in DoRA also
    what is added to the base layer's output, as in PEFT.

    It is a Linear in every respect: `weight`, `bias` and `dtype` are those of `base`, shared with
    it, and parameters keep their paths; the new ones are `lora_a`, `lora_b`, `lora_magnitude`.
    """

    def __init__(
        self,
        base: Linear,
        a: Float[Array, "R I"],
        b: Float[Array, "O R"],
        *,
        alpha: float,
        rslora: bool = False,
        dropout_rate: float = 0.0,
        magnitude: Float[Array, " O"] | None = None,
    ):
        self.weight = nnx.Param(base.weight[...])
        self.bias = None if base.bias is None else nnx.Param(base.bias[...])
        self.dtype = base.dtype
        self.lora_a, self.lora_b = nnx.Param(a), nnx.Param(b)
        self.lora_magnitude = None if magnitude is None else nnx.Param(magnitude)
        self.alpha, self.rslora, self.dropout_rate = float(alpha), rslora, dropout_rate

    @property
    def rank(self) -> int:
        return self.lora_a[...].shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __call__(
        self, x: Float[Array, "... I"], key: jax.Array | None = None
    ) -> Float[Array, "... O"]:
        y = super().__call__(x)
        x = dropout(x.astype(self.dtype), self.dropout_rate, key)
        a, b = (p[...].astype(self.dtype) for p in (self.lora_a, self.lora_b))
        change = times_transposed(times_transposed(x, a), b) * self.scale
        if self.lora_magnitude is None:
            return y + change
        ratio = self._ratio(jax.lax.stop_gradient(row_norms(self._sum())))
        plain = times_transposed(x, self.weight[...].astype(self.dtype))
        return y + (ratio - 1).astype(self.dtype) * plain + ratio.astype(self.dtype) * change

    def merged(self) -> Linear:
        """A plain Linear with the same output: summed in float32, kept in the weight's dtype."""
        weight = self._sum()
        if self.lora_magnitude is not None:
            weight = self._ratio(row_norms(weight))[:, None] * weight
        dtype = self.weight[...].dtype
        biased = self.bias is not None
        plain = Linear(1, 1, use_bias=biased, dtype=self.dtype, param_dtype=dtype, rngs=None)
        plain.weight = nnx.Param(weight.astype(dtype))
        if self.bias is not None:
            plain.bias = nnx.Param(self.bias[...])
        return plain

    def _sum(self) -> Float[Array, "O I"]:
        w, a, b = (p[...].astype(jnp.float32) for p in (self.weight, self.lora_a, self.lora_b))
        return w + self.scale * jnp.matmul(b, a)

    def _ratio(self, norms: Float[Array, " O"]) -> Float[Array, " O"]:
        assert self.lora_magnitude is not None
        # A row of zeros gives zeros, whatever its magnitude.
        return self.lora_magnitude[...].astype(jnp.float32) / jnp.where(norms > 0, norms, 1.0)


def row_norms(weight: Float[Array, "O I"]) -> Float[Array, " O"]:
    """Euclidean length of each row, in float32: where DoRA's magnitudes begin."""
    return jnp.linalg.norm(weight.astype(jnp.float32), axis=1)
