"""Normalisation layers. Statistics are always in float32, as in TF and HF; RMSNorm casts the result
back before it multiplies by the weight, LayerNorm after."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """RMSNorm ``x / rms(x) * weight``: no mean, no bias (Zhang & Sennrich 2019, arXiv:1910.07467).

    >>> norm = RMSNorm(4, eps=0.0, dtype=jnp.float32, param_dtype=jnp.float32)
    >>> norm(jnp.array([1.0, -1.0, 1.0, -1.0])).tolist()
    [1.0, -1.0, 1.0, -1.0]
    """

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike, param_dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((features,), param_dtype))
        self.eps, self.dtype = eps, jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(self.dtype) * self.weight[...].astype(self.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm ``(x - mean) / std * weight + bias`` (Ba et al. 2016, arXiv:1607.06450)."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike, param_dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype))
        self.eps, self.dtype = eps, jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(self.dtype)
