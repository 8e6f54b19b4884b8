"""Statistics in float32, whatever the dtype."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.linear import LayerNorm, RMSNorm
from jaxllm.nn.platform.products import (
    mean_in_parts,
    over_rms,
    over_rms_in_parts,
    over_rms_within_products,
    standardized,
    standardized_in_one_pass,
)


def values(shape=(3, 64), scale=1.0):
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)


def made(cls, dtype, eps=1e-6):
    norm = cls(64, eps=eps, dtype=dtype, param_dtype=jnp.float32)
    norm.weight[...] = jnp.asarray(1 + values((64,)) / 4)
    if cls is LayerNorm:
        norm.bias[...] = jnp.asarray(values((64,))[::-1])
    return norm


def expected(norm, x, eps=1e-6):
    x = x.astype(np.float64)
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(norm.weight[...])
    return x + np.asarray(norm.bias[...]) if isinstance(norm, LayerNorm) else x


@pytest.mark.by_default("LayerNorm")
@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_formula(cls):
    x, norm = values() + 0.5, made(cls, jnp.float32)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected(norm, x), atol=1e-5)
    norm = made(cls, jnp.float32, eps=0.5)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected(norm, x, 0.5), atol=1e-5)


@pytest.mark.by_default("bfloat16-10000.0-LayerNorm", "float16-3000.0-LayerNorm")
@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1e4), ("float16", 3e3)])
def test_half_precision(cls, dtype, scale):
    """Squares of these values are infinite in float16, and lose their sum in bfloat16."""
    x, norm = jnp.asarray(values(scale=scale), dtype), made(cls, dtype)
    actual = norm(x)
    assert actual.dtype == dtype
    distance = np.abs(np.asarray(actual, np.float32) - expected(norm, np.asarray(x, np.float32)))
    assert distance.max() < {"bfloat16": 2e-2, "float16": 3e-3}[dtype]


def test_rms_norm_casts_before_it_multiplies_by_the_weight():
    x = jnp.asarray(values(), jnp.bfloat16)
    norm = made(RMSNorm, jnp.bfloat16)
    plain = RMSNorm(64, eps=1e-6, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    np.testing.assert_array_equal(norm(x), plain(x) * norm.weight[...].astype(jnp.bfloat16))


@pytest.mark.ci
def test_normalisations_within_products_are_equal() -> None:
    """That of a decode step on a TPU, which other platforms and sequences do not have."""
    norm = RMSNorm(6, eps=1e-6, dtype=jnp.float32, param_dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(0), (2, 1, 6)) * 30
    np.testing.assert_allclose(over_rms_within_products(x, eps=1e-6), norm(x), rtol=1e-6)
    for tokens, platform, count in ((1, "tpu", 1), (1, "cpu", 0), (3, "tpu", 0)):
        traced = jax.jit(norm.__call__).trace(jnp.ones((2, tokens, 6)))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == count


@pytest.mark.ci
def test_one_pass_equals_two() -> None:
    """And has the same gradient, for rows whose mean is not zero."""
    x, direction = jnp.asarray(values((2, 3, 64)) + 0.5), jnp.asarray(values((2, 3, 64), 2.0))
    results = []
    for function in (standardized, standardized_in_one_pass):
        y, gradient = jax.vjp(functools.partial(function, eps=1e-6), x)
        results.append((y, gradient(direction)[0]))
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("width", [6, 1025, 1600, 4096])
def test_the_norms_of_one_row_on_a_gpu(width: int) -> None:
    """Values beside float64, and gradients beside those of the usual form."""
    x, direction = values((1, 1, width)) + 0.5, jnp.asarray(values((1, 1, width), 2.0)[..., ::-1])
    eps = 1e-6
    one_pass = functools.partial(standardized_in_one_pass, mean=mean_in_parts)
    for function, usual, shift in (
        (over_rms_in_parts, over_rms, 0.0),
        (one_pass, standardized, x.astype(np.float64).mean()),
    ):
        y, gradient = jax.vjp(functools.partial(function, eps=eps), jnp.asarray(x))
        exact = x.astype(np.float64) - shift
        exact = exact / np.sqrt((exact**2).mean() + eps)
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=2e-6)
        _, expected = jax.vjp(functools.partial(usual, eps=eps), jnp.asarray(x))
        (actual,), (wanted,) = gradient(direction), expected(direction)
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize(("cls", "sums"), [(RMSNorm, 1), (LayerNorm, 2)])
def test_only_a_gpu_sums_a_wide_row_in_parts(cls, sums: int) -> None:
    for rows, width, platform, count in (
        (1, 2048, "cuda", sums),
        (2, 2048, "cuda", 0),
        (1, 512, "cuda", 0),
        (1, 2048, "cpu", 0),
    ):
        norm = cls(width, eps=1e-6, dtype=jnp.float32, param_dtype=jnp.float32)
        traced = jax.jit(norm.__call__).trace(jnp.ones((rows, 1, width)))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == count
