"""Normalisation layers. Statistics are always in float32, as in TF and HF; RMSNorm casts the result
back before it multiplies by the weight, LayerNorm after."""

from __future__ import annotations

import functools

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

    def for_products(
        self, x: Float[Array, "B T D"], count: int
    ) -> tuple[Float[Array, "B T D"], ...]:
        """The result, once for each of the `count` products that read it."""

        def shared(x: Array) -> tuple[Array, ...]:
            return (self(x),) * count

        # PERF(tpu): each product of a decode step has its own normalisation inside it. One for all
        # would be a further operation, which costs as much as a small product;
        # docs/decisions/tpu-decode-step.md.
        if x.shape[1] > 1:
            return shared(x)
        separate = functools.partial(self.separately, count=count)
        return jax.lax.platform_dependent(x, tpu=separate, default=shared)

    def separately(self, x: Float[Array, "B T D"], count: int) -> tuple[Float[Array, "B T D"], ...]:
        """Equal results, which XLA computes one by one."""
        y = x.astype(jnp.float32)
        squares = jnp.sum(y * y, axis=-1, keepdims=True)
        results = []
        for i in range(count):
            # Behind a barrier 1/D is an array, so that `rsqrt` is not one of each row alone, which
            # XLA would keep out of the product. Barriers of equal arguments would be merged.
            part = jnp.full(x.shape[-1], 1 / x.shape[-1], jnp.float32)
            part, _ = jax.lax.optimization_barrier((part, jnp.int32(i)))
            z = (y * jax.lax.rsqrt(squares * part + self.eps)).astype(self.dtype)
            results.append(z * self.weight[...].astype(self.dtype))
        return tuple(results)


class LayerNorm(nnx.Module):
    """LayerNorm ``(x - mean) / std * weight + bias`` (Ba et al. 2016, arXiv:1607.06450).

    With `one_pass` the variance of sequences is E(x^2) - E(x)^2, as in Flax; its error is that of
    float32 times E(x^2).
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        one_pass: bool = False,
    ):
        self.weight = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype))
        self.eps, self.dtype, self.one_pass = eps, jnp.dtype(dtype), one_pass

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = x.astype(jnp.float32)
        if self.one_pass and y.ndim == 3 and y.shape[1] > 1:
            # PERF(tpu): the second of two passes waits for the first, and in the backward pass
            # again. Both sums of one pass are part of the product before it;
            # docs/decisions/tpu-training-step.md.
            mean, squares = (jnp.mean(z, axis=-1, keepdims=True) for z in (y, jnp.square(y)))
            variance = jnp.maximum(squares - jnp.square(mean), 0)
            y = (y - mean) * jax.lax.rsqrt(variance + self.eps)
        else:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(self.dtype)

    def for_products(
        self, x: Float[Array, "B T D"], count: int
    ) -> tuple[Float[Array, "B T D"], ...]:
        """The result, once for each of the `count` products that read it."""
        return (self(x),) * count
