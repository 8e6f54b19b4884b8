"""Attention of few queries to a KV cache: a CPU reads only the slots that hold tokens, a GPU runs
few kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.kv_cache import KV
from jaxllm.nn import cpu_kernels

PREFIXES = 4
MIN_SPLIT_SLOTS = 64
MAX_SPLIT_QUERIES = 8


def attend_cache(
    attend: Callable[..., Array],
    q: Float[Array, "B T N H"],
    kv: KV,
    used_slots: Int[Array, ""] | None,
    *,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """``attend(q, kv, visible, bias)``: eager attention with a `scale`.

    Args:
        used_slots: number of the cache's first slots that hold tokens; None: any slot may.
    """

    def everything(q: Array, kv: KV, visible: Array, bias: Array | None) -> Array:
        return attend(q, kv, visible, bias)

    splits = kv.capacity >= MIN_SPLIT_SLOTS and q.shape[1] <= MAX_SPLIT_QUERIES
    tuned: dict[str, Callable[..., Array]] = {}
    if attends_in_kernel(q, kv, bias):
        # PERF(cpu): all cores, and the visible slots only; docs/decisions/cpu-kernels.md.
        tuned["cpu"] = attend_in_kernel(everything, scale)
    elif used_slots is not None and splits:
        tuned["cpu"] = functools.partial(attend_used_slots, attend, used_slots)
    if q.shape[1] == 1:
        tuned["cuda"] = functools.partial(attend_one_query, scale=scale)
    if not tuned:
        return everything(q, kv, visible, bias)
    return jax.lax.platform_dependent(q, kv, visible, bias, default=everything, **tuned)


def attend_one_query(
    q: Float[Array, "B 1 N H"],
    kv: KV,
    visible: Bool[Array, "B 1 1 S"],
    bias: Float[Array, "#B N 1 S"] | None,
    *,
    scale: float,
) -> Float[Array, "B 1 N H"]:
    """Eager attention of one query for each row and head, whose weights are divided by their sums
    before they multiply the values."""
    # PERF(gpu): XLA makes one kernel of scale, mask and softmax if the scores keep the axes of
    # their product and nothing is left to do after that of the values, and otherwise four;
    # docs/decisions/gpu-decode-step.md.
    batch, _, heads, _ = q.shape
    kv_heads = math.prod(kv.leading_shape) // batch
    group = heads // kv_heads
    by_group = (kv_heads, group, kv.capacity)
    scores = kv.scores(q.reshape(*kv.leading_shape, group, -1)).reshape(batch, *by_group) * scale
    if bias is not None:
        scores = scores + bias.astype(jnp.float32).reshape(-1, *by_group)
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(visible, jax.nn.softmax(scores), 0).astype(q.dtype)
    summed = kv.weighted_values(weights.reshape(*kv.leading_shape, group, -1))
    return summed.astype(q.dtype).reshape(q.shape)


def attends_in_kernel(q: Float[Array, "B T N H"], kv: KV, bias: Array | None) -> bool:
    """True if the CPU's kernel of attention has this form of cache."""
    arrays = (q, kv.k, kv.v, *(() if bias is None else (bias,)))
    plain = type(kv) is KV and len(kv.leading_shape) == 1
    return plain and q.shape[3] % 16 == 0 and cpu_kernels.usable(*arrays)


def attend_in_kernel(attend: Callable[..., Array], scale: float) -> Callable[..., Array]:
    """`attend` with the CPU's kernel; where it is differentiated, `attend` itself."""

    @jax.custom_jvp
    def run(q: Array, kv: KV, visible: Array, bias: Array | None) -> Array:
        return cpu_kernels.attention(q, kv.k, kv.v, visible, bias, scale)

    run.defjvp(functools.partial(jax.jvp, attend))
    return run


def attend_used_slots(
    attend: Callable[..., Array],
    used_slots: Int[Array, ""],
    q: Float[Array, "B T N H"],
    kv: KV,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
) -> Float[Array, "B T N H"]:
    """``attend(q, kv, visible, bias)`` for a cache with tokens in its first slots only."""
    size = kv.capacity
    prefixes = [size * i // PREFIXES for i in range(1, PREFIXES + 1)]

    def over(length: int):
        def run(q: Array, kv: KV, visible: Array, bias: Array | None):
            bias = None if bias is None else bias[..., :length]
            return attend(q, kv.prefix(length), visible[..., :length], bias)

        return run

    # PERF(cpu): reads only the shortest of four prefixes that covers the used slots, since reading
    # the cache is a large part of a decode step; on other backends the branch costs more than it
    # saves; benchmarks/decode.py.
    which = jnp.searchsorted(jnp.asarray(prefixes), used_slots)
    return jax.lax.switch(which, [over(p) for p in prefixes], q, kv, visible, bias)
