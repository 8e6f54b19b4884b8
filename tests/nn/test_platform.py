"""Code for one platform: it computes what the others compute, and only that platform runs it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.kv_cache import KV
from jaxllm.cache.variants import QuantizedKV
from jaxllm.nn.attention import attend
from jaxllm.nn.platform import padded_product

ROWS, HEADS, SLOTS, SIZE = 2, 3, 9, 8


def cache(*, quantized: bool = False) -> KV:
    random = np.random.default_rng(0)
    k, v = (random.normal(size=(ROWS, SLOTS, HEADS, SIZE)).astype(np.float32) for _ in range(2))
    kv = KV.from_sequence(jnp.asarray(k), jnp.asarray(v))
    return QuantizedKV.like(kv).write(k, v, jnp.int32(0)) if quantized else kv


@pytest.mark.parametrize("quantized", [False, True])
def test_padding_of_a_single_query_changes_no_product(quantized):
    kv = cache(quantized=quantized)
    q = jax.random.normal(jax.random.key(1), (ROWS * HEADS, 1, SIZE))
    weights = jax.random.uniform(jax.random.key(2), (ROWS * HEADS, 1, SLOTS))
    for product, queries in ((kv.scores, q), (kv.weighted_values, weights)):
        expected = product(queries)
        out = jax.jit(functools.partial(padded_product, product))(queries)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "heads", "columns", "padded"),
    [
        ("tpu", HEADS, 1, True),
        ("tpu", 2 * HEADS, 1, False),  # two query heads share each key
        ("tpu", HEADS, 5, False),
        ("cpu", HEADS, 1, False),
        ("cuda", HEADS, 1, False),
    ],
)
def test_only_a_tpu_pads_a_single_query(platform, heads, columns, padded):
    q = jnp.zeros((ROWS, columns, heads, SIZE))
    visible = jnp.ones((ROWS, 1, 1, SLOTS), bool)
    traced = jax.jit(functools.partial(attend, scale=1.0)).trace(q, cache(), visible=visible)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.pad") == (2 if padded else 0)
    assert ("optimization_barrier" in text) == padded
