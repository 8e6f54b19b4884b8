"""Products of queries and keys of all heads of a row at once, as models for TPUs compute them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.kv_cache import KV
from jaxllm.nn.attention import Scores, attend
from jaxllm.nn.platform.attention import head_products

B, K, S, H = 2, 3, 9, 8


def cache(*, head_axis: bool, kv_heads: int = K, head_dim: int = H) -> KV:
    k, v = jax.random.normal(jax.random.key(0), (2, B, S, kv_heads, head_dim))
    return KV.from_sequence(k, v, head_axis=head_axis)


@pytest.mark.ci
@pytest.mark.parametrize("queries", [1, 6])
def test_products_across_heads_equal_those_of_each_head(queries: int) -> None:
    kv, merged = cache(head_axis=True), cache(head_axis=False)
    q = jax.random.normal(jax.random.key(1), (B, K, queries, H))
    weights = jax.random.uniform(jax.random.key(2), (B, K, queries, S))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    products = head_products(kv, queries)
    scores, sums = products.scores(q), products.weighted_values(weights)
    close(scores, merged.scores(q.reshape(B * K, queries, H)).reshape(scores.shape))
    close(sums, merged.weighted_values(weights.reshape(B * K, queries, S)).reshape(sums.shape))


@pytest.mark.by_default("True-8-50-100")
@pytest.mark.parametrize(
    ("head_axis", "head_dim", "columns", "rows"),
    [
        (True, H, 1, 2 * K),  # six queries of a row, times the keys of its three heads
        (True, H, 50, 100),  # more queries than a tile has rows: a product for each head
        (True, 128, 1, 2),  # a wide head fills the lanes itself
        (False, H, 1, 2),
    ],
)
def test_few_queries_of_narrow_heads_are_one_matrix_per_row(
    head_axis: bool, head_dim: int, columns: int, rows: int
) -> None:
    kv = cache(head_axis=head_axis, head_dim=head_dim)
    q = jnp.zeros((B, columns, 2 * K, head_dim))
    visible = jnp.ones((B, 1, 1, S), bool)
    traced = jax.jit(functools.partial(attend, scores=Scores(1.0))).trace(q, kv, visible)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    batch = (B,) if rows == 2 * K else kv.leading_shape
    expected = "x".join(map(str, (*batch, rows, S)))
    assert len(products) == 2
    assert products[0].endswith(f"tensor<{expected}xf32>")
