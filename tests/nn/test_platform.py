"""Code for one platform: it computes what the others compute, and only that platform runs it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxllm.cache.kv_cache import KV
from jaxllm.cache.variants import QuantizedKV
from jaxllm.nn.attention import Scores, attend
from jaxllm.nn.linear import Embedding, Linear, declare_axes
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.platform.attention import (
    attend_cache,
    attend_one_query,
    attend_whole_tiles,
    fills_tiles,
    largest_scores,
    padded_product,
    split_heads,
    with_gradient_in_token_order,
)
from jaxllm.nn.platform.products import (
    SUBLANES,
    beside_zeros,
    in_xla,
    plus_bias,
    rows_by_product,
    sum_of_groups,
    times_as_int8,
    times_converted,
    times_transposed,
)
from jaxllm.nn.platform.training import (
    MAX_LOGITS,
    logits_within_memory,
    updated_by_select,
    updated_if,
    updated_in_loop,
)
from jaxllm.nn.quantized import Int4Matrix, Int8Matrix, QuantizedEmbedding
from jaxllm.parallel.sharding import abstract_mesh, use_mesh

ROWS, HEADS, SLOTS, SIZE = 2, 3, 9, 8


def cache(*, quantized: bool = False) -> KV:
    random = np.random.default_rng(0)
    k, v = (random.normal(size=(ROWS, SLOTS, HEADS, SIZE)).astype(np.float32) for _ in range(2))
    kv = KV.from_sequence(jnp.asarray(k), jnp.asarray(v))
    return QuantizedKV.like(kv).write(k, v, jnp.int32(0)) if quantized else kv


@pytest.mark.ci
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_products_of_quantized_weights(rows):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, 96)), jnp.float32)
    weight = jnp.asarray(random.normal(size=(40, 96)), jnp.float32)
    for quantize in (Int8Matrix.quantize, Int4Matrix.quantize):
        matrix = quantize(weight)
        expected = x @ matrix.dequantized().T
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-3)
        close(matrix.times(x), expected)
        if isinstance(matrix, Int8Matrix):
            arguments = (matrix.values[...], matrix.scale[...])
            close(times_converted(x, *arguments), expected)
            gradient = jax.grad(lambda x, a=arguments: jnp.sum(times_as_int8(x, *a) ** 2))(x)
            close(gradient, 2 * expected @ matrix.dequantized(), rtol=1e-3, atol=0.05)
        else:
            parts = (matrix.groups[...], matrix.multipliers[...], matrix.scale[...])
            close(sum_of_groups(x, *parts), expected)
    assert not np.asarray(Int8Matrix.quantize(jnp.zeros((2, 4))).times(x[:, :4])).any()


@pytest.mark.in_ci("cuda-1")
@pytest.mark.parametrize(("platform", "rows"), [("tpu", 1), ("tpu", 2), ("cpu", 1), ("cuda", 1)])
def test_only_a_tpu_multiplies_a_single_row_beside_zeros(platform: str, rows: int) -> None:
    x, w = jnp.zeros((rows, 1, 16)), jnp.zeros((24, 16))
    plain = Embedding(24, 16, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
    embedding = QuantizedEmbedding(Int8Matrix.quantize(w), plain)
    for function, arrays in (
        (times_transposed, (x, w)),
        (Int8Matrix.quantize(w).times, (x,)),
        (Int4Matrix.quantize(w).times, (x,)),
        (embedding, (jnp.zeros((rows, 1), int),)),
    ):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
        padded = "stablehlo.pad" in text and f"tensor<{SUBLANES * rows}x" in text
        assert padded == (platform == "tpu" and rows == 1)


@pytest.mark.parametrize(("columns", "multiplied"), [(1, 4 * SUBLANES), (4, 4)])
def test_a_tpu_multiplies_a_single_row_of_each_device_beside_zeros(
    columns: int, multiplied: int
) -> None:
    """A device that has four tokens does not take them for one row of each of four devices."""
    x = jnp.zeros((4, columns, 16))
    layer = Linear(16, 24, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
    declare_axes("mlp", up=layer)
    with use_mesh(abstract_mesh(fsdp=4)):
        text = jax.jit(layer).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert f"(tensor<{multiplied}x16xf32>, tensor<24x16xf32>)" in text


@pytest.mark.parametrize(
    ("platform", "columns", "width", "count"),
    [("tpu", 1, 8192, 1), ("tpu", 1, 4096, 0), ("tpu", 17, 8192, 0), ("cuda", 1, 8192, 0)],
)
def test_wide_features_of_a_tpu_are_computed_before_the_product(
    platform: str, columns: int, width: int, count: int
) -> None:
    x = jnp.zeros((2, columns, 16))
    options = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": None}
    up, down = Linear(16, width, **options), Linear(width, 16, **options)
    for layer in (MLP(up, down, jax.nn.relu), GatedMLP(up, up, down, jax.nn.relu)):
        text = jax.jit(layer).trace(x).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == count


@pytest.mark.parametrize(("platform", "count"), [("cuda", 2), ("cpu", 0), ("tpu", 0)])
def test_only_a_gpu_projects_the_keys_of_cross_attention_layer_by_layer(
    platform: str, count: int
) -> None:
    model = tiny.cached("t5")
    states = jnp.zeros((2, 5, model.config.d_model))
    for is_inference in (True, False):
        project = functools.partial(model.decoder.project_cross_kv, is_inference=is_inference)
        text = jax.jit(project).trace(states).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == count * is_inference


def test_rows_of_zeros_change_no_product() -> None:
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=(n, 16)), jnp.float32) for n in (3, 24))
    np.testing.assert_allclose(beside_zeros(in_xla, x, w), x @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("quantized", [False, True])
def test_padding_of_a_single_query_changes_no_product(quantized):
    kv = cache(quantized=quantized)
    q = jax.random.normal(jax.random.key(1), (ROWS * HEADS, 1, SIZE))
    weights = jax.random.uniform(jax.random.key(2), (ROWS * HEADS, 1, SLOTS))
    for product, queries in ((kv.scores, q), (kv.weighted_values, weights)):
        expected = product(queries)
        out = jax.jit(functools.partial(padded_product, product))(queries)
        np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("quantized", [False, True])
def test_attention_of_one_query_equals_eager_attention(quantized):
    kv = cache(quantized=quantized)
    q = 2 * jax.random.normal(jax.random.key(1), (ROWS, 1, 2 * HEADS, SIZE))
    bias = jax.random.normal(jax.random.key(2), (1, 2 * HEADS, 1, SLOTS))
    slots = jnp.arange(SLOTS)
    visible = (slots < jnp.array([SLOTS - 4, 0])[:, None])[:, None, None]
    for some_bias in (None, bias):
        expected = attend(q, kv, visible, some_bias, scores=Scores(0.7))
        out = attend_one_query(q, kv, visible, some_bias, scores=Scores(0.7))
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        assert np.asarray(out[0]).any()
        assert not np.asarray(out[1]).any()  # a row without visible slots


@pytest.mark.in_ci("cpu")
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_only_a_gpu_keeps_scores_by_group(platform):
    def run(q, kv, visible, bias):
        return attend(q, kv, visible=visible, bias=bias, scores=Scores(1.0))

    q = jnp.zeros((ROWS, 1, 2 * HEADS, SIZE))
    visible = jnp.ones((ROWS, 1, 1, SLOTS), bool)
    step = functools.partial(attend_cache, run, visible=visible, bias=None, scores=Scores(1.0))
    traced = jax.jit(step).trace(q, cache(), None)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (f"tensor<{ROWS}x{HEADS}x2x{SLOTS}xf32>" in text) == (platform == "cuda")


@pytest.mark.in_ci("tpu-3-1-True")
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
    traced = jax.jit(functools.partial(attend, scores=Scores(1.0))).trace(q, cache(), visible)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.pad") == (2 if padded else 0)
    largest_apart = platform == "tpu" and columns == 1
    assert text.count("optimization_barrier") == 2 * padded + largest_apart


@pytest.mark.parametrize(
    ("rows", "shards", "apart"), [(8, 1, 1), (9, 1, 0), (16, 2, 1), (18, 2, 0)]
)
def test_a_tpu_finds_the_largest_scores_of_few_rows_apart(
    rows: int, shards: int, apart: int
) -> None:
    scores = jnp.zeros((rows, HEADS, 1, SLOTS))
    with use_mesh(abstract_mesh(data=shards)):
        traced = jax.jit(largest_scores).trace(scores)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("optimization_barrier") == apart


@pytest.mark.ci
@pytest.mark.parametrize("bias_rows", [0, 1, ROWS])
@pytest.mark.parametrize("quantized", [False, True])
def test_queries_of_zeros_change_no_attention(bias_rows: int, quantized: bool) -> None:
    random = np.random.default_rng(0)
    heads = 3 * HEADS  # 3 of a group, which do not divide a tile
    q = jnp.asarray(random.normal(size=(ROWS, 1, heads, SIZE)), jnp.float32)
    visible = jnp.asarray(random.random((ROWS, 1, 1, SLOTS)) < 0.7).at[0].set(False)
    bias = jnp.asarray(random.normal(size=(bias_rows, heads, 1, SLOTS)), jnp.float32)
    arguments = (q, cache(quantized=quantized), visible, bias if bias_rows else None)
    plain = functools.partial(attend, scores=Scores(0.3, softcap=2.0))
    actual = attend_whole_tiles(plain, *arguments)
    np.testing.assert_allclose(actual, plain(*arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "rows", "heads", "tiled"),
    [("tpu", 9, 2, True), ("tpu", 8, 2, False), ("tpu", 9, 8, False), ("cpu", 9, 2, False)],
)
def test_a_tpu_fills_a_tile_of_queries_in_a_batch(
    platform: str, rows: int, heads: int, tiled: bool
) -> None:
    kv = KV.zeros(rows, SLOTS, 1, SIZE, jnp.float32)
    q, visible = jnp.zeros((rows, 1, heads, SIZE)), jnp.ones((rows, 1, 1, SLOTS), bool)
    scores = Scores(1.0)
    step = functools.partial(attend_cache, functools.partial(attend, scores=scores), scores=scores)
    traced = jax.jit(lambda *x: step(*x, None, visible=visible, bias=None)).trace(q, kv)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.pad" in text) == tiled


def test_tiles_are_filled_by_the_rows_of_a_device_and_the_layout_of_the_cache() -> None:
    def fills(rows: int, heads: int, *, head_axis: bool = False) -> bool:
        keys = jnp.zeros((rows, 1, SLOTS, SIZE) if head_axis else (rows, SLOTS, SIZE))
        return fills_tiles(jnp.zeros((rows, 1, heads, SIZE)), KV(keys, keys))

    assert fills(9, 2)
    assert not fills(9, 1)  # padded by `head_products`
    assert not fills(9, 2, head_axis=True)  # all heads of a row are one product
    for mesh in (abstract_mesh(data=2), abstract_mesh(fsdp=2)):
        with use_mesh(mesh):
            assert fills(18, 2)
            assert not fills(16, 2)


@pytest.mark.parametrize(
    ("platform", "columns", "count"), [("tpu", 1, 1), ("tpu", 2, 0), ("cpu", 1, 0)]
)
def test_queries_of_a_tpu_are_split_behind_a_barrier(
    platform: str, columns: int, count: int
) -> None:
    x = jnp.arange(2.0 * columns * 12).reshape(2, columns, 12)
    split = functools.partial(split_heads, is_rotated=False)
    traced = jax.jit(split, static_argnums=1).trace(x, 3)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("optimization_barrier") == count
    np.testing.assert_array_equal(split(x, 3), x.reshape(2, columns, 3, 4))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("platform", "columns", "constraints"), [("tpu", 2, 1), ("tpu", 1, 0), ("cpu", 2, 0)]
)
def test_gradients_of_projections_are_in_token_order_on_a_tpu(
    platform: str, columns: int, constraints: int
) -> None:
    def output(x: jax.Array) -> jax.Array:
        return with_gradient_in_token_order(jnp.sin(x)).sum()

    def constraints_of(function: Any) -> int:
        traced = jax.jit(function).trace(jnp.zeros((3, columns, 8)))
        return traced.lower(lowering_platforms=(platform,)).as_text().count("@LayoutConstraint")

    assert constraints_of(jax.grad(output)) == constraints
    assert constraints_of(output) == 0
    jax.jvp(output, (jnp.zeros((3, columns, 8)),), (jnp.ones((3, columns, 8)),))


@pytest.mark.parametrize(("rows", "features", "shard"), [(4, 8, "2x3x4"), (3, 9, "3x3x9")])
def test_gradients_of_sharded_projections_stay_sharded(
    rows: int, features: int, shard: str
) -> None:
    """XLA would all-gather the features of an array whose layout is constrained as a whole."""

    def output(x: jax.Array) -> jax.Array:
        return with_gradient_in_token_order(jnp.sin(x)).sum()

    with use_mesh(abstract_mesh(fsdp=2, tensor=2)):
        traced = jax.jit(jax.grad(output)).trace(jnp.zeros((rows, 3, features)))
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    (line,) = (x for x in text.splitlines() if "@LayoutConstraint" in x)
    assert f"-> tensor<{shard}xf32>" in line
    assert "all_reduce" not in text


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_bias_as_a_product(dtype: Any) -> None:
    """Small integers, of which every sum is exact."""
    way = jnp.asarray(np.random.default_rng(0).integers(-2, 3, (3, 20, 16)), dtype)
    rows, gradient = jax.vjp(functools.partial(rows_by_product, shape=way.shape), way[0, 0])
    np.testing.assert_array_equal(rows, jnp.broadcast_to(way[0, 0], way.shape))
    np.testing.assert_array_equal(gradient(way)[0], way.sum(axis=(0, 1)))
    _, gradients = jax.vjp(plus_bias, way, way[0, 0])
    np.testing.assert_array_equal(gradients(way)[1], way.sum(axis=(0, 1)))


@pytest.mark.parametrize("finite", [True, False])
def test_both_ways_to_update_keep_the_state_without_a_condition(finite: bool) -> None:
    state = {"x": jnp.arange(3.0), "count": jnp.int32(7)}

    def update(state: Any) -> Any:
        return {"x": state["x"] / (1.0 if finite else 0.0), "count": state["count"] + 1}

    expected = update(state) if finite else state
    for way in (updated_in_loop, updated_by_select):
        found = jax.jit(functools.partial(way, update=update))(finite, state)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert found["count"].dtype == jnp.int32


@pytest.mark.parametrize(
    ("platform", "devices", "loops"), [("cuda", 1, 0), ("cuda", 2, 1), ("tpu", 1, 1), ("cpu", 1, 1)]
)
def test_only_a_single_gpu_updates_by_a_select(platform: str, devices: int, loops: int) -> None:
    def updated(condition: jax.Array, x: jax.Array) -> jax.Array:
        return updated_if(condition, jnp.sin, x)

    mesh = abstract_mesh(fsdp=devices) if devices > 1 else None
    with use_mesh(mesh):
        traced = jax.jit(updated).trace(jnp.bool_(True), jnp.zeros((4, 8)))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.while") == loops


def test_a_gpu_holds_more_logits_at_once() -> None:
    half, single = np.dtype(jnp.bfloat16), np.dtype(np.float32)
    assert {
        logits_within_memory(platform, x) for platform in ("cpu", "tpu") for x in (half, single)
    } == {MAX_LOGITS}
    assert 2 * logits_within_memory("gpu", half) == 4 * logits_within_memory("gpu", single) == 2**31
    gib = 1 << 30
    bytes_of = {
        memory: 2 * logits_within_memory("gpu", half, memory * gib) for memory in (8, 32, 80)
    }
    assert bytes_of == {8: gib // 2, 32: gib, 80: 2 * gib}
