"""Tuning per platform: operations whose plain form one backend runs slowly.

Each function computes the same on every backend. What is done for one of them is marked
``PERF(cpu)``; a backend with other needs gets a branch here, and the layers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt16

from jaxllm.cache.kv_cache import KV

PREFIXES = 4
SMALLEST_SPLIT_CACHE = 64
MOST_SPLIT_QUERIES = 8


def times_transposed(x: Float[Array, "*rest I"], w: Float[Array, "O I"]) -> Float[Array, "*rest O"]:
    """``x W^T``."""
    # PERF(cpu): a product of two matrices; with three axes gradients take half as long again;
    # benchmarks/train.py.
    y = jax.lax.dot_general(x.reshape(-1, x.shape[-1]), w, (((1,), (1,)), ((), ())))
    return y.reshape(*x.shape[:-1], w.shape[0])


def random_uint16(key: Array, size: int) -> UInt16[Array, " {size}"]:
    """Uniform random numbers, drawn once however often they are used."""
    words = jax.random.bits(key, ((size + 1) // 2,), jnp.uint32)
    # PERF(cpu): each word gives two numbers, since drawing is most of dropout's cost; without the
    # barrier XLA fuses the drawing into every use and repeats it there; benchmarks/train.py.
    words = jax.lax.optimization_barrier(words)
    return jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size]


def after_gradient(x: Array, gradient: Array) -> Array:
    """x, not to be used before the gradient is there."""
    # PERF(cpu): XLA drops barriers before it orders the program, so a use of the gradient stays (0
    # times it could be NaN). Else it computes all blocks again before the first is needed, and
    # remat saves no memory; benchmarks/train.py.
    return jax.lax.platform_dependent(
        x, gradient, cpu=lambda x, gradient: x + gradient * 0, default=lambda x, gradient: x
    )


def splits_cache(slots: int, queries: int) -> bool:
    """Whether `over_used_slots` pays off for a cache of this size."""
    return slots >= SMALLEST_SPLIT_CACHE and queries <= MOST_SPLIT_QUERIES


def over_used_slots(
    attend: Callable[..., Array],
    q: Float[Array, "B T N H"],
    kv: KV,
    used: Int[Array, ""],
    *,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
) -> Float[Array, "B T N H"]:
    """``attend(q, kv, visible, bias)`` over a cache whose first `used` slots hold all there is."""
    size = kv.length
    prefixes = [size * i // PREFIXES for i in range(1, PREFIXES + 1)]

    def over(length: int):
        def run(q, kv, visible, bias):
            bias = None if bias is None else bias[..., :length]
            return attend(q, kv.prefix(length), visible[..., :length], bias)

        return run

    def shortest(q, kv, visible, bias):
        which = jnp.searchsorted(jnp.asarray(prefixes), used)
        return jax.lax.switch(which, [over(p) for p in prefixes], q, kv, visible, bias)

    # PERF(cpu): the shortest of four prefixes is read, since reading the cache is a good part of a
    # decode step; elsewhere a branch costs more than it saves; benchmarks/decode.py.
    return jax.lax.platform_dependent(q, kv, visible, bias, cpu=shortest, default=over(size))
