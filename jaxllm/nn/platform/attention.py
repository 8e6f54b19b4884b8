"""Attention of few queries to a KV cache, as in a decode step.

A step has few queries for each head, too few for a matrix unit. Here is what a TPU's compiler turns
into faster products, what a GPU runs in few kernels, and how a CPU reads only the slots that hold
tokens: the same results as `jaxllm.nn.attention.attend`. docs/decisions/ explains them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import SlotIndices
from jaxllm.cache.kv_cache import KV
from jaxllm.common.precision import float32_einsum
from jaxllm.nn.platform.products import at_most, kernel_attention, kernel_usable
from jaxllm.parallel.sharding import (
    context_mesh,
    heads_are_sharded,
    manual_axes,
    partition_spec,
    row_shards,
)

NewColumns = tuple[Float[Array, "B T K H"], Float[Array, "B T K H"], SlotIndices]
"""Keys and values of new columns, and the cache slots that they are written to."""
QUERY_TILE = 8
"""Rows of a tile of a TPU's matrix unit."""
LANES = 128
"""Columns of a tile."""
SLOT_MULTIPLE = 8
"""The slots of a cache that a GPU's kernel of decode steps takes are a multiple of this number."""
MAX_ROWS_APART = 8
"""Most rows of a device in a decode step on TPUs whose largest scores are an operation of their
own."""
MAX_ROWS_OF_PART_TILES = 8
"""Most rows of a device in a decode step on TPUs whose grouped queries are not filled up to a
tile."""
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
    scores: Any,
) -> Float[Array, "B T N H"]:
    """``attend(q, kv, visible, bias)`` in the form that suits the platform.

    Args:
        used_slots: number of the cache's first slots that hold tokens; None: any slot may.
        scores: the `jaxllm.nn.attention.Scores` of `attend`.
    """
    # Only a cache, whose capacity is a number, has used slots; `jax.export` may leave others open.
    splits = used_slots is not None and at_most(q.shape[1], MAX_SPLIT_QUERIES)
    tuned: dict[str, Callable[..., Array]] = {}
    if scores.softcap is None and attends_in_kernel(q, kv, bias):
        # PERF(cpu): all cores, and the visible slots only; docs/decisions/cpu-kernels.md.
        tuned["cpu"] = attend_in_kernel(attend, scores.scale)
    elif used_slots is not None and splits and kv.capacity >= MIN_SPLIT_SLOTS:
        tuned["cpu"] = functools.partial(attend_used_slots, attend, used_slots)
    if q.shape[1] == 1:
        tuned["cuda"] = functools.partial(attend_one_query, scores=scores)
        if fills_tiles(q, kv):
            tuned["tpu"] = functools.partial(attend_whole_tiles, attend)
    if not tuned:
        return attend(q, kv, visible, bias)
    return jax.lax.platform_dependent(q, kv, visible, bias, default=attend, **tuned)


def attend_one_query(
    q: Float[Array, "B 1 N H"],
    kv: KV,
    visible: Bool[Array, "B 1 1 S"],
    bias: Float[Array, "#B N 1 S"] | None,
    *,
    scores: Any,
) -> Float[Array, "B 1 N H"]:
    """Attention of one query for each row and head, whose weights are divided by their sums before
    they multiply the values."""
    # PERF(gpu): XLA makes one kernel of scale, mask and softmax if the scores keep the axes of
    # their product and nothing is left to do after that of the values, and otherwise four;
    # docs/decisions/gpu-programs.md.
    batch, _, heads, _ = q.shape
    kv_heads = math.prod(kv.leading_shape) // batch
    group = heads // kv_heads
    by_group = (kv_heads, group, kv.capacity)
    products = kv.scores(q.reshape(*kv.leading_shape, group, -1)).reshape(batch, *by_group)
    bias = None if bias is None else bias.reshape(-1, *by_group)
    weights = jax.nn.softmax(scores(products, visible, bias))
    weights = jnp.where(visible, weights, 0).astype(q.dtype)
    summed = kv.weighted_values(weights.reshape(*kv.leading_shape, group, -1))
    return summed.astype(q.dtype).reshape(q.shape)


def fills_tiles(q: Float[Array, "B 1 N H"], kv: KV) -> bool:
    """True if a TPU attends with as many queries for each head of the cache as a tile has."""
    group = q.shape[2] * q.shape[0] // math.prod(kv.leading_shape)
    if at_most(rows_of_device(q), MAX_ROWS_OF_PART_TILES) or multiplies_across_heads(kv, group):
        return False
    return 1 < group < QUERY_TILE


def attend_whole_tiles(
    attend: Callable[..., Array],
    q: Float[Array, "B 1 N H"],
    kv: KV,
    visible: Bool[Array, "B 1 1 S"],
    bias: Float[Array, "#B N 1 S"] | None,
) -> Float[Array, "B 1 N H"]:
    """``attend(q, kv, visible, bias)`` with zeros for further queries of each head."""
    # PERF(tpu): for less than a tile XLA reads the keys in smaller windows, in up to 1.3 times the
    # time; docs/decisions/tpu-decode-step.md.
    batch, _, heads, size = q.shape
    kv_heads = math.prod(kv.leading_shape) // batch
    group = heads // kv_heads

    def filled(x: Array, axis: int) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, QUERY_TILE - group)
        return jnp.pad(x, widths)

    queries = filled(q.reshape(batch, 1, kv_heads, group, size), 3)
    if bias is not None:
        bias = filled(bias.reshape(len(bias), kv_heads, group, 1, -1), 2)
        bias = bias.reshape(len(bias), -1, 1, bias.shape[-1])
    out = attend(queries.reshape(batch, 1, -1, size), kv, visible, bias)
    return out.reshape(queries.shape)[:, :, :, :group].reshape(q.shape)


def attends_in_kernel(q: Float[Array, "B T N H"], kv: KV, bias: Array | None) -> bool:
    """True if the CPU's kernel of attention has this form of cache."""
    arrays = (q, kv.k, kv.v, *(() if bias is None else (bias,)))
    plain = type(kv) is KV and len(kv.leading_shape) == 1
    return plain and q.shape[3] % 16 == 0 and kernel_usable(*arrays)


def attend_in_kernel(attend: Callable[..., Array], scale: float) -> Callable[..., Array]:
    """`attend` with the CPU's kernel; where it is differentiated, `attend` itself."""

    @jax.custom_jvp
    def run(q: Array, kv: KV, visible: Array, bias: Array | None) -> Array:
        return kernel_attention(q, kv.k, kv.v, visible, bias, scale)

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


class HeadProducts(NamedTuple):
    """The products of queries and keys, and of weights and values, as of `KV`."""

    scores: Callable[[Float[Array, "*BK Q H"]], Float[Array, "*BK Q S"]]
    weighted_values: Callable[[Float[Array, "*BK Q S"]], Float[Array, "*BK Q H"]]


def head_products(kv: KV, queries: int) -> KV | HeadProducts:
    """The products of a cache and `queries` queries of each of its heads."""
    if multiplies_across_heads(kv, queries):
        return HeadProducts(
            functools.partial(scores_across_heads, k=kv.k),
            functools.partial(values_across_heads, v=kv.v),
        )
    if queries != 1:
        return kv
    # PERF(tpu): XLA computes the product of a single query, as in a decode step of GPT-2 or T5, in
    # float32 on the vector unit, in a layout that copies the whole cache before and after the loop.
    return HeadProducts(
        functools.partial(of_one_query, kv.scores),
        functools.partial(of_one_query, kv.weighted_values),
    )


def cache_has_head_axis(platform: str, head_dim: int) -> bool:
    """True if a model that runs on a platform has the cache ``[B, K, S, H]`` (`KV`)."""
    # PERF(tpu): a cache of narrow heads has its slots in the lanes. Then the heads of a row are one
    # matrix, which `scores_across_heads` multiplies. With a merged axis of rows and heads XLA would
    # put that axis in the lanes if there are few slots, and copy the cache before and after the
    # loop; docs/decisions/tpu-decode-step.md.
    return platform == "tpu" and head_dim < LANES


def multiplies_across_heads(kv: KV, queries: int) -> bool:
    """True if the queries of all heads of a row are multiplied by all of its keys at once."""
    if type(kv) is not KV or len(kv.leading_shape) == 1 or heads_are_sharded():
        return False
    return kv.k.shape[-1] < LANES and kv.leading_shape[1] * queries <= LANES


def scores_across_heads(
    q: Float[Array, "B K Q H"], k: Float[Array, "B K S H"]
) -> Float[Array, "B K Q S"]:
    """Dot products of each head's queries and keys in one product for each row, float32.

    A query is extended by zeros for the other heads. These are K times the multiplications, but
    the keys of several heads fill a TPU's matrix unit, and the scores fill whole tiles.
    """
    B, K, Q, H = q.shape
    extended = q.reshape(B, K * Q, 1, H) * own_heads(K, Q, q.dtype)
    scores = float32_einsum("bnkh,bksh->bns", extended, k)
    return scores.reshape(B, K, Q, -1)


def values_across_heads(
    weights: Float[Array, "B K Q S"], v: Float[Array, "B K S H"]
) -> Float[Array, "B K Q H"]:
    """Weighted sums of each head's values in one product for each row, float32.

    As queries in `scores_across_heads`, weights are extended by zeros for the other heads.
    """
    B, K, Q, S = weights.shape
    extended = weights.astype(v.dtype).reshape(B, K * Q, 1, S) * own_heads(K, Q, v.dtype)
    sums = float32_einsum("bnks,bksh->bnh", extended, v)
    return sums.reshape(B, K, Q, -1)


def own_heads(heads: int, queries: int, dtype: DTypeLike) -> Float[Array, "KQ K 1"]:
    """1 where a query, `queries` for each head, is one of the head, and else 0."""
    # A constant: `jnp.eye` is computed anew in each decode step.
    return jnp.asarray(np.repeat(np.eye(heads), queries, axis=0)[..., None], dtype)


def of_one_query(
    product: Callable[[Array], Array], queries: Float[Array, "*BK 1 X"]
) -> Float[Array, "*BK 1 Y"]:
    """``product(queries)``, on a TPU with further queries of zeros."""
    tiled = functools.partial(padded_product, product)
    return jax.lax.platform_dependent(queries, tpu=tiled, default=product)


def padded_product(
    product: Callable[[Array], Array], queries: Float[Array, "*BK Q X"]
) -> Float[Array, "*BK Q Y"]:
    """``product(queries)`` with zeros for further queries, up to a tile of the matrix unit."""
    count = queries.shape[-2]
    widths = [(0, 0)] * (queries.ndim - 2) + [(0, QUERY_TILE - count), (0, 0)]
    # The barrier keeps XLA from dropping the padding.
    out = jax.lax.optimization_barrier(product(jnp.pad(queries, widths)))
    return out[..., :count, :]


def split_heads(
    x: Float[Array, "B T D"], heads: int, *, is_rotated: bool
) -> Float[Array, "B T N H"]:
    """Splits the output of a projection into heads.

    Args:
        is_rotated: RoPE follows, which a TPU computes with the projection inside its product.
    """
    # PERF(tpu): without the barrier XLA computes the product of a decode step with the heads as its
    # first axis, and copies it; docs/decisions/tpu-decode-step.md.
    if x.shape[1] == 1 and not is_rotated:
        barrier = jax.lax.optimization_barrier
        x = jax.lax.platform_dependent(x, tpu=barrier, default=lambda x: x)
    return x.reshape(*x.shape[:2], heads, -1)


@jax.custom_jvp
def with_gradient_in_token_order(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns the output of a projection, whose gradient a TPU has `in_token_order`."""
    return x


@with_gradient_in_token_order.defjvp
def _with_gradient_in_token_order_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (of_x,) = tangents
    if of_x.shape[1] != 1:
        of_x = jax.lax.platform_dependent(of_x, tpu=parts_in_token_order, default=lambda x: x)
    return with_gradient_in_token_order(*primals), of_x


def parts_in_token_order(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns x, each device's part `in_token_order`.

    XLA all-gathers features that are sharded before it constrains their layout.
    """
    mesh = context_mesh()
    if mesh is None or manual_axes(mesh):
        return in_token_order(x)
    spec = partition_spec(x.shape, ("rows", None, "heads"), mesh)
    return jax.shard_map(in_token_order, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def in_token_order(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns x, token after token in memory, as products with the projections' matrices read it.

    XLA would keep the order of an attention kernel, heads first, and copy it for each of the
    products and sums that read it.
    """
    return with_layout_constraint(x, Layout((0, 1, 2)))


def rows_of_device(x: Float[Array, "B ..."]) -> int:
    """Number of rows of a batch that one device has."""
    return x.shape[0] // row_shards(context_mesh())


def largest_scores(scores: Float[Array, "B N T S"]) -> Float[Array, "B N T 1"]:
    """The largest of each query's scores."""
    largest = scores.max(axis=-1, keepdims=True)
    # PERF(tpu): without the barrier XLA computes the softmax of a decode step within one operation,
    # in which every entry of a row searches the row for its largest. With many rows that is still
    # faster than an operation more; docs/decisions/tpu-decode-step.md.
    if scores.shape[2] == 1 and at_most(rows_of_device(scores), MAX_ROWS_APART):
        barrier = jax.lax.optimization_barrier
        largest = jax.lax.platform_dependent(largest, tpu=barrier, default=lambda x: x)
    return largest
