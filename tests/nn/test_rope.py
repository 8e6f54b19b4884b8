"""Cosines and sines against the reference's, and the rotation itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity_data import cases, load_case
from parity_runs import model_of

from jaxllm.common.errors import ConfigError, UnsupportedError
from jaxllm.nn.rope import (
    ROPE_TYPES,
    Rope,
    rope_from_config,
    rotate,
    rotate_by_product,
    rotate_each_head,
    rotate_halves,
)

TABLES = [
    (name, call)
    for name in cases("llama_")
    for call in ("rope_short", "rope_long")
    if call in load_case(name).calls
]


@pytest.mark.in_ci("llama_dynamic_v4-rope_long", "llama_dynamic_v4-rope_short")
@pytest.mark.parametrize(("name", "call"), TABLES)
def test_angles(name, call):
    stored = load_case(name).calls[call]
    positions = jnp.asarray(stored.inputs["position_ids"], jnp.int32)
    cos, sin = model_of(name).config.rotary.angles(positions, positions.max(keepdims=True) + 1)
    np.testing.assert_allclose(cos[:, :, 0], stored.outputs["cos"], atol=1e-5)
    np.testing.assert_allclose(sin[:, :, 0], stored.outputs["sin"], atol=1e-5)


def test_all_types_are_among_the_tables():
    assert {model_of(name).config.rotary.rope_type for name, _ in TABLES} | {"default"} == set(
        ROPE_TYPES
    )


@pytest.mark.ci
def test_rotation_turns_half_split_pairs():
    """Pair (i, i + 2) of four dimensions turns by position * theta**(-i / 2)."""
    rope = Rope(head_dim=4, theta=100.0)
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 4)).astype(np.float32)
    positions = jnp.array([[0, 1, 7]])
    actual = rotate(jnp.asarray(x), *rope.angles(positions, jnp.array([[8]])))
    expected = np.empty_like(x)
    for t, position in enumerate([0, 1, 7]):
        for i, frequency in enumerate([1.0, 0.1]):
            c, s = math.cos(position * frequency), math.sin(position * frequency)
            a, b = x[:, t, :, i], x[:, t, :, i + 2]
            expected[:, t, :, i], expected[:, t, :, i + 2] = a * c - b * s, b * c + a * s
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.ci
def test_scores_depend_on_distance_only():
    rope = Rope(head_dim=8)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    def score(a, b):
        turned = [
            rotate(jnp.asarray(x), *rope.angles(jnp.array([[p]]), jnp.array([[4096]])))
            for x, p in ((q, a), (k, b))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 3) == pytest.approx(score(2005, 2003), abs=2e-3)
    assert abs(score(5, 3) - score(5, 4)) > 1e-2


@pytest.mark.ci
def test_far_positions_stay_apart_under_bfloat16():
    """bfloat16 holds 769 of the positions 0..4095; the angles are float32 whatever x is."""
    cos, sin = Rope(head_dim=64).angles(jnp.arange(4096)[None], jnp.array([[4096]]))
    assert cos.dtype == sin.dtype == jnp.float32
    assert len(np.unique(np.asarray(sin[0, :, 0, 0]))) > 4000
    x = jnp.ones((1, 4096, 1, 64), jnp.bfloat16)
    assert rotate(x, cos, sin).dtype == jnp.bfloat16


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_where_the_ramp_has_no_width(truncate):
    """low == high must not divide by zero."""
    scaling = {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 1.0}
    raw = {"rope_scaling": scaling | {"truncate": truncate}}
    rope = rope_from_config(raw, head_dim=16, max_positions=64)
    assert np.isfinite(rope.frequencies(jnp.int32(1))).all()


def test_files_of_yarn():
    """`finetuned` says how the model was trained; some tools write sizes as floats."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    plain = rope_from_config({"rope_scaling": scaling}, head_dim=16, max_positions=64)
    other = scaling | {"original_max_position_embeddings": 16.0, "finetuned": True}
    assert rope_from_config({"rope_scaling": other}, head_dim=16, max_positions=64) == plain


@pytest.mark.parametrize(
    ("raw", "error", "field"),
    [
        ({"rope_scaling": {"rope_type": "mrope"}}, UnsupportedError, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, ConfigError, "rope_parameters.factor"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, ConfigError, "factor"),
        ({"rope_scaling": {"finetuned": True}}, UnsupportedError, "rope_scaling.finetuned"),
        ({"rope_parameters": {"full_attention": {"a": 1}}}, UnsupportedError, "full_attention"),
        ({"rope_theta": "1e4"}, ConfigError, "rope_theta"),
        ({"rope_theta": 1}, ConfigError, "rope_theta"),
        ({"rope_theta": math.inf}, ConfigError, "rope_theta"),
        ({"rope_theta": math.nan}, ConfigError, "rope_theta"),
        ({"partial_rotary_factor": 0.2}, ConfigError, "even part of a head, 16, found 0.2"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            ConfigError,
            "partial_rotary_factor",
        ),
        (
            {
                "original_max_position_embeddings": 8,
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4},
            },
            ConfigError,
            "original_max_position_embeddings",
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, ConfigError, "rope_type"),
    ],
)
def test_errors_name_the_field(raw, error, field):
    with pytest.raises(error) as caught:
        rope_from_config(raw, head_dim=16, max_positions=64)
    assert field in str(caught.value)


def test_a_part_of_each_head_is_rotated():
    rope = rope_from_config({"partial_rotary_factor": 0.75}, head_dim=16, max_positions=64)
    whole = rope_from_config({}, head_dim=12, max_positions=64)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 16)).astype(np.float32))
    positions, length = jnp.arange(10).reshape(2, 5), jnp.array([[10]])
    found = rotate(x, *rope.angles(positions, length))
    np.testing.assert_array_equal(found[..., 12:], x[..., 12:])
    expected = rotate(x[..., :12], *whole.angles(positions, length))
    np.testing.assert_array_equal(found[..., :12], expected)


def test_odd_heads_raise():
    with pytest.raises(ConfigError, match=r"head_dim: .* found 5"):
        rope_from_config({}, head_dim=5, max_positions=64)


def test_settings_without_effect_are_accepted():
    plain = rope_from_config({}, head_dim=16, max_positions=64)
    for raw in (
        {"rope_scaling": None, "rope_parameters": {}, "rope_theta": None},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
        {"rope_scaling": {"rope_type": None, "factor": None}},
        {"rope_scaling": {"type": "default", "rope_type": "default"}},
    ):
        assert rope_from_config(raw, head_dim=16, max_positions=64) == plain


@pytest.mark.by_default("bfloat16-rotate_by_product", "bfloat16-rotate_each_head")
@pytest.mark.parametrize("rotation", [rotate_by_product, rotate_each_head])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_by_a_product_is_exact(dtype: str, rotation: Callable[..., jax.Array]) -> None:
    """Equal but for fused multiply-adds, with which XLA leaves out the rounding of a product."""
    x = jax.random.normal(jax.random.key(0), (2, 1, 3, 8), dtype)
    angles = Rope(head_dim=8).angles(jnp.array([[3], [11]]), jnp.array([[12]]))
    actual, expected = (jax.jit(f)(x, *angles) for f in (rotation, rotate_halves))
    # A rounding of two products and of their sum, of at most 2**-24 each; bfloat16 hides them.
    rounding = 4 * 2**-24 * float(abs(x).max()) if dtype == "float32" else 0
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=0, atol=rounding
    )


@pytest.mark.in_ci("cpu-1-3-8-0")
@pytest.mark.parametrize(
    ("platform", "columns", "heads", "size", "products"),
    [
        *[("tpu", 1, 3, 8, 1), ("tpu", 1, 16, 128, 1), ("cpu", 1, 3, 8, 0)],
        *[("tpu", 2, 129, 8, 1), ("tpu", 2, 3, 128, 1), ("cpu", 2, 3, 8, 0)],
    ],
)
def test_heads_of_a_tpu_rotate_by_a_product(
    platform: str, columns: int, heads: int, size: int, products: int
) -> None:
    x, angles = jnp.zeros((2, columns, heads, size)), jnp.zeros((2, columns, 1, size))
    traced = jax.jit(rotate).trace(x, angles, angles)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.dot_general") == products
