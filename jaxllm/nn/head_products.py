"""Products of each head's queries and keys, and of its attention weights and values.

A decode step has few queries for each head, too few for a matrix unit. The plain products are those
of `KV`; here is what a TPU's compiler turns into faster ones, with the same results.
docs/decisions/tpu-decode-step.md explains them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxllm.cache.kv_cache import KV
from jaxllm.parallel.mesh import heads_are_sharded

QUERY_TILE = 8
"""Rows of a tile of a TPU's matrix unit."""
LANES = 128
"""Columns of a tile."""


def cache_has_head_axis(head_dim: int) -> bool:
    """True if the cache of a model on a TPU is ``[B, K, S, H]`` (`KV`)."""
    # PERF(tpu): a cache of narrow heads has its slots in the lanes. Then the heads of a row are one
    # matrix, which `scores_across_heads` multiplies. With a merged axis of rows and heads XLA would
    # put that axis in the lanes if there are few slots, and copy the cache before and after the
    # loop; docs/decisions/tpu-decode-step.md.
    return head_dim < LANES


def scores_of_keys(kv: KV, q: Float[Array, "*BK Q H"]) -> Float[Array, "*BK Q S"]:
    """`KV.scores`, in the form that suits the platform."""
    if multiplies_across_heads(kv, q.shape[-2]):
        return scores_across_heads(q, kv.k)
    return with_query_tile(kv.scores, q)


def sums_of_values(kv: KV, weights: Float[Array, "*BK Q S"]) -> Float[Array, "*BK Q H"]:
    """`KV.weighted_values`, in the form that suits the platform."""
    if multiplies_across_heads(kv, weights.shape[-2]):
        return values_across_heads(weights, kv.v)
    return with_query_tile(kv.weighted_values, weights)


def multiplies_across_heads(kv: KV, queries: int) -> bool:
    """True if the queries of all heads of a row are multiplied by all of its keys at once."""
    if type(kv) is not KV or len(kv.leading_shape) == 1 or heads_are_sharded():
        return False
    return cache_has_head_axis(kv.k.shape[-1]) and kv.leading_shape[1] * queries <= LANES


def scores_across_heads(
    q: Float[Array, "B K Q H"], k: Float[Array, "B K S H"]
) -> Float[Array, "B K Q S"]:
    """Dot products of each head's queries and keys in one product for each row, float32.

    A query is extended by zeros for the other heads. These are K times the multiplications, but
    the keys of several heads fill a TPU's matrix unit, and the scores fill whole tiles.
    """
    B, K, Q, H = q.shape
    extended = q.reshape(B, K * Q, 1, H) * own_heads(K, Q, q.dtype)
    scores = jnp.einsum("bnkh,bksh->bns", extended, k, preferred_element_type=jnp.float32)
    return scores.reshape(B, K, Q, -1)


def values_across_heads(
    weights: Float[Array, "B K Q S"], v: Float[Array, "B K S H"]
) -> Float[Array, "B K Q H"]:
    """Weighted sums of each head's values in one product for each row, float32.

    As queries in `scores_across_heads`, weights are extended by zeros for the other heads.
    """
    B, K, Q, S = weights.shape
    extended = weights.astype(v.dtype).reshape(B, K * Q, 1, S) * own_heads(K, Q, v.dtype)
    sums = jnp.einsum("bnks,bksh->bnh", extended, v, preferred_element_type=jnp.float32)
    return sums.reshape(B, K, Q, -1)


def own_heads(heads: int, queries: int, dtype: DTypeLike) -> Float[Array, "KQ K 1"]:
    """1 where a query, `queries` for each head, is one of the head, and else 0."""
    # A constant: `jnp.eye` is computed anew in each decode step.
    return jnp.asarray(np.repeat(np.eye(heads), queries, axis=0)[..., None], dtype)


def with_query_tile(
    product: Callable[[Array], Array], queries: Float[Array, "*BK Q X"]
) -> Float[Array, "*BK Q Y"]:
    """``product(queries)``, a matrix product of each key/value head's queries."""
    # PERF(tpu): XLA computes the product of a single query, as in a decode step of GPT-2 or T5, in
    # float32 on the vector unit, in a layout that copies the whole cache before and after the loop.
    if queries.shape[-2] > 1:
        return product(queries)
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
