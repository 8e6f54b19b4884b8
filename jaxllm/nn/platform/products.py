"""Matrix products of linear layers, with a kernel for few rows on a CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.nn import cpu_kernels

TRANSPOSED = (((1,), (1,)), ((), ()))
"""Dimension numbers of ``x W^T``."""
SUBLANES = 8
"""Rows of a TPU's vector register. A product of one row would become a sum again."""


def times_transposed(x: Float[Array, "*rest I"], w: Float[Array, "O I"]) -> Float[Array, "*rest O"]:
    """Matrix product ``x W^T``."""
    # PERF(cpu): x is flattened to a matrix; with a 3-axis x gradients take 1.5 times as long;
    # benchmarks/train.py.
    rows = x.reshape(-1, x.shape[-1])
    few = len(rows) <= cpu_kernels.MAX_ROWS and cpu_kernels.usable(x, w)
    y = few_times_transposed(rows, w) if few else jax.lax.dot_general(rows, w, TRANSPOSED)
    return y.reshape(*x.shape[:-1], w.shape[0])


@jax.custom_jvp
def few_times_transposed(x: Float[Array, "B I"], w: Float[Array, "O I"]) -> Float[Array, "B O"]:
    """`times_transposed` of a few rows, with a kernel on a CPU."""

    def in_xla(x: Array, w: Array) -> Array:
        return jax.lax.dot_general(x, w, TRANSPOSED)

    # PERF(cpu): XLA's product takes 1.2 to 1.6 times as long; docs/decisions/cpu-kernels.md.
    return jax.lax.platform_dependent(x, w, cpu=cpu_kernels.product, default=in_xla)


@few_times_transposed.defjvp
def _few_times_transposed_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return jax.jvp(lambda x, w: jax.lax.dot_general(x, w, TRANSPOSED), primals, tangents)


@jax.custom_jvp
def plus_bias(y: Float[Array, "*rest O"], bias: Float[Array, " O"]) -> Float[Array, "*rest O"]:
    """``y + bias`` in one dtype."""
    return y + bias


@plus_bias.defjvp
def _plus_bias_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    of_y, of_bias = tangents
    # PERF(tpu): its gradient, a sum over tokens, is a product too. On the vector unit the sum takes
    # twice as long as the product with the weights; docs/decisions/tpu-training-step.md.
    by_product = functools.partial(rows_by_product, shape=of_y.shape)
    broadcast = functools.partial(jnp.broadcast_to, shape=of_y.shape)
    return plus_bias(*primals), of_y + jax.lax.platform_dependent(
        of_bias, tpu=by_product, default=broadcast
    )


def rows_by_product(x: Float[Array, " O"], *, shape: tuple[int, ...]) -> Float[Array, "*rest O"]:
    """``jnp.broadcast_to(x, shape)``, whose gradient is a product with ones."""
    first = jnp.pad(x[None], ((0, SUBLANES - 1), (0, 0)))
    ones = jnp.ones((*shape[:-1], SUBLANES), x.dtype)
    exact = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.matmul(ones, first, precision=exact)
