"""Mixture of experts: grouped products against all experts for all tokens, on both platforms."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata
from jaxtyping import Array, Float, Int

from jaxllm.nn.experts import (
    ExpertFunction,
    MixtureOfExperts,
    Router,
    weighted_sum,
)
from jaxllm.nn.mlp import ACTIVATIONS, Activation
from jaxllm.nn.platform import experts as platform_experts
from jaxllm.nn.platform.experts import by_tiles, grouped_product, tile_rows, tiles_of
from jaxllm.nn.quantized import Int8Matrix

EXPERTS, FEATURES, INNER = 6, 16, 24
UNUSED = 4
silu = ACTIVATIONS["silu"]


def layers_of(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {
        "expert_gate": (EXPERTS, INNER, FEATURES),
        "expert_up": (EXPERTS, INNER, FEATURES),
        "expert_down": (EXPERTS, FEATURES, INNER),
    }
    return {
        name: jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, jnp.float32)
        for name, shape in shapes.items()
    }


def routing(kind: str, rows: int, columns: int, top_k: int) -> np.ndarray:
    """Experts of each token: any, any but one, or the same of all tokens."""
    rng = np.random.default_rng(rows)
    if kind == "same":
        return np.broadcast_to([3, 1][:top_k], (rows, columns, top_k))
    allowed = [e for e in range(EXPERTS) if kind == "any" or e != UNUSED]
    drawn = [rng.permutation(allowed)[:top_k] for _ in range(rows * columns)]
    return np.reshape(drawn, (rows, columns, top_k))


def inputs_of(kind: str, rows: int, columns: int, top_k: int = 2) -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((rows, columns, FEATURES)), jnp.float32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (rows, columns, top_k)), jnp.float32)
    return x, jnp.asarray(routing(kind, rows, columns, top_k)), weights


def all_experts(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    layers: dict[str, Any],
    *,
    act: Activation,
) -> Float[Array, "B T D"]:
    """The definition of `weighted_sum`: computes all experts for all tokens."""
    function = ExpertFunction(act)
    rows = x.reshape(-1, x.shape[-1])
    y = jax.vmap(lambda layers: function(layers, rows))(layers)
    y = jnp.moveaxis(y, 0, 1).reshape(*x.shape[:-1], -1, x.shape[-1])
    chosen = jnp.take_along_axis(y, experts[..., None], axis=-2)
    return jnp.sum((chosen * weights[..., None]).astype(jnp.float32), axis=-2).astype(x.dtype)


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "top_k"),
    [
        ("any", 1, 1, 2),
        ("any", 4, 17, 2),
        ("but one", 5, 3, 2),
        ("same", 3, 11, 2),
        ("any", 3, 40, 1),
    ],
)
def test_grouped_products_equal_all_experts(kind: str, rows: int, columns: int, top_k: int) -> None:
    """Outputs, and gradients of tokens, router weights and experts."""
    x, experts, weights = inputs_of(kind, rows, columns, top_k)
    layers = layers_of()
    direction = jnp.asarray(np.random.default_rng(2).standard_normal(x.shape), jnp.float32)

    def grouped(x: Any, weights: Any, layers: Any) -> Any:
        y = weighted_sum(x, experts, weights, layers, act=silu, platform="cpu")
        return jnp.sum(y * direction), y

    def dense(x: Any, weights: Any, layers: Any) -> Any:
        y = all_experts(x, experts, weights, layers, act=silu)
        return jnp.sum(y * direction), y

    results = [
        jax.jit(jax.grad(f, argnums=(0, 1, 2), has_aux=True))(x, weights, layers)
        for f in (grouped, dense)
    ]
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_weights_of_unused_experts_are_not_read() -> None:
    """NaN in them reaches nothing; that of the other platform's kernel is in the next test."""
    x, experts, weights = inputs_of("but one", 4, 6)
    layers = {name: w.at[UNUSED].set(jnp.nan) for name, w in layers_of().items()}

    def total(layers: Any) -> Any:
        y = weighted_sum(x, experts, weights, layers, act=silu, platform="cpu")
        return jnp.sum(y), y

    gradients, y = jax.jit(jax.grad(total, has_aux=True))(layers)
    assert jnp.isfinite(y).all()
    for gradient in gradients.values():
        assert jnp.isfinite(gradient).all()
        assert not gradient[UNUSED].any()


@pytest.mark.parametrize("sizes", [(5, 0, 9, 0, 1, 0), (0, 0, 40, 0, 0, 0), (1, 1, 1, 1, 1, 1)])
def test_tiles_of_used_experts_only(sizes: tuple[int, ...]) -> None:
    """As many as their rows need, here and in the TPU's kernel; the loop runs these tiles."""
    rows = sum(sizes)
    tile = tile_rows(rows, EXPERTS)
    expected = [e for e, size in enumerate(sizes) for _ in range(-(-size // tile))]
    most = rows // tile + min(rows, EXPERTS)
    count, experts, starts, ends = tiles_of(jnp.array(sizes), tile, most)
    assert experts[: int(count)].tolist() == expected
    covered = [
        row
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for row in range(start, min(start + tile, end))
    ]
    assert covered[:rows] == list(range(rows))

    ran: list[int] = []

    def one_expert(weights: Any, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda number: ran.append(int(number)), weights["number"])
        return x * weights["number"]

    numbers = {"number": jnp.arange(EXPERTS, dtype=jnp.float32)}
    y: Any = by_tiles(one_expert, numbers, jnp.ones((rows, 1)), jnp.array(sizes))
    jax.effects_barrier()
    assert sorted(ran) == expected
    assert y[:, 0].tolist() == np.repeat(np.arange(EXPERTS), sizes).tolist()

    kernel_rows = 8
    (_, groups, _), number = make_group_metadata(
        group_sizes=jnp.array(sizes, jnp.int32),
        m=-(-rows // kernel_rows) * kernel_rows,
        tm=kernel_rows,
        start_group=jnp.int32(0),
        num_nonzero_groups=EXPERTS,
        visit_empty_groups=False,
    )
    visited = groups[: int(number)].tolist()
    assert set(visited) == set(expected)
    begins = np.cumsum([0, *sizes])
    touched = [
        -(-int(end) // kernel_rows) - int(begin) // kernel_rows
        for begin, end in itertools.pairwise(begins)
        if end > begin
    ]
    assert len(visited) == sum(touched)


@pytest.mark.ci
def test_the_kernel_of_a_tpu_equals_the_loop() -> None:
    """In JAX operations; products, and their gradients. Some rows belong to no expert."""
    rng = np.random.default_rng(0)
    sizes = jnp.array([7, 0, 20, 3], jnp.int32)
    x = jnp.asarray(rng.standard_normal((40, 16)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((4, 24, 16)), jnp.float32)
    direction = jnp.asarray(rng.standard_normal((40, 24)), jnp.float32)

    def kernel(x: Any, w: Any) -> Any:
        y: Any = grouped_product(x, w, sizes, True)
        return jnp.sum(y * direction), y

    def loop(x: Any, w: Any) -> Any:
        y: Any = by_tiles(lambda w, x: x @ w.T, w, x, sizes)
        return jnp.sum(y * direction), y

    results = [jax.grad(f, argnums=(0, 1), has_aux=True)(x, w) for f in (kernel, loop)]
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert not results[0][1][30:].any()


@pytest.mark.ci
def test_a_layer_on_a_tpu(monkeypatch: Any) -> None:
    """The wiring around the kernel, of which the tile loop takes the place."""
    monkeypatch.setattr(
        "jaxllm.nn.experts.grouped_product",
        lambda x, w, sizes: by_tiles(lambda w, x: x @ w.T, w, x, sizes),
    )
    x, experts, weights = inputs_of("any", 2, 5)
    results = [
        weighted_sum(x, experts, weights, layers_of(), act=silu, platform=platform)
        for platform in ("cpu", "tpu")
    ]
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)


def test_a_token_alone_equals_a_token_among_others() -> None:
    """Whatever the others are: padding, or far more tokens for an expert than for the rest."""
    x, experts, weights = inputs_of("any", 3, 8)
    layers = layers_of()

    def run(x: Any, experts: Any, weights: Any) -> Any:
        return weighted_sum(x, experts, weights, layers, act=silu, platform="cpu")

    among = run(x.at[1:].set(1e6), experts.at[1:].set(0), weights)
    alone = run(x[:1], experts[:1], weights[:1])
    np.testing.assert_allclose(among[:1], alone, atol=1e-5)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("keeps_float32", [False, True])
def test_router_weights(normalized: bool, keeps_float32: bool) -> None:
    """The largest entries of a float32 softmax; their dtype is that of the reference."""
    options = {"top_k": 3, "normalized": normalized, "keeps_float32": keeps_float32}
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": None}
    router = Router(FEATURES, EXPERTS, **options, **dtypes)
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, EXPERTS)), jnp.bfloat16)
    experts, weights = router.choose(logits)
    assert weights.dtype == (jnp.float32 if keeps_float32 else jnp.bfloat16)
    exact = np.exp(np.asarray(logits, np.float64))
    exact /= exact.sum(-1, keepdims=True)
    for token in np.ndindex(2, 4):
        best = np.argsort(-exact[token], kind="stable")[:3]
        assert experts[token].tolist() == best.tolist()
        expected = exact[token][best] / (exact[token][best].sum() if normalized else 1)
        tolerance = 1e-6 if keeps_float32 else 2**-8
        np.testing.assert_allclose(weights[token], expected, rtol=tolerance)


@pytest.mark.ci
def test_quantized_experts_compute_with_their_matrices() -> None:
    """The tile loop takes one expert's integers and scales."""
    x, experts, weights = inputs_of("any", 2, 60)
    matrices = {name: jax.vmap(Int8Matrix.quantize)(w) for name, w in layers_of().items()}
    actual = weighted_sum(x, experts, weights, matrices, act=silu, platform="tpu")
    floats = {
        name: matrix.values[...] * matrix.scale[...][..., None] for name, matrix in matrices.items()
    }
    expected = all_experts(x, experts, weights, floats, act=silu)
    np.testing.assert_allclose(actual, expected, atol=1e-3 * float(expected.std()))


def test_equal_functions_are_one_program() -> None:
    assert ExpertFunction(silu) == ExpertFunction(silu)
    assert hash(ExpertFunction(silu)) == hash(ExpertFunction(silu))
    assert tile_rows(platform_experts.MAX_TILE * 64, 8) == platform_experts.MAX_TILE


@pytest.mark.ci
def test_jitter_acts_with_a_key_only() -> None:
    from jaxllm.models.build_options import FLOAT32
    from jaxllm.models.mixtral import MixtralConfig
    from jaxllm.models.rotary_decoder import RotaryLayers

    config = MixtralConfig(
        vocab_size=8, hidden_size=FEATURES, intermediate_size=INNER, hidden_act="silu"
    )
    make = RotaryLayers(config, FLOAT32, None)
    layer = make.experts(EXPERTS, INNER, top_k=2, jitter=0.5)
    assert isinstance(layer, MixtureOfExperts)
    for name, w in layers_of().items():
        getattr(layer, name).weight[...] = w
    x, _, _ = inputs_of("any", 2, 3)
    still, _ = layer(x)
    moved, _ = layer(x, key=jax.random.key(0))
    assert np.abs(moved - still).max() > 1e-2
    layer.jitter = 0.0
    np.testing.assert_array_equal(layer(x, key=jax.random.key(0))[0], still)
