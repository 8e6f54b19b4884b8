"""Matrix products of linear layers, with a kernel for few rows on a CPU."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from jaxllm.nn import cpu_kernels

TRANSPOSED = (((1,), (1,)), ((), ()))
"""Dimension numbers of ``x W^T``."""


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

    # PERF(cpu): XLA's product takes 1.2 to 1.6 times as long; docs/performance.md.
    return jax.lax.platform_dependent(x, w, cpu=cpu_kernels.product, default=in_xla)


@few_times_transposed.defjvp
def _few_times_transposed_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return jax.jvp(lambda x, w: jax.lax.dot_general(x, w, TRANSPOSED), primals, tangents)
