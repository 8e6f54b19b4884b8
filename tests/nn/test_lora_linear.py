"""The layer with LoRA, rsLoRA and DoRA against the formulas written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.linear import Linear, dropout
from jaxllm.nn.lora import LoraLinear, row_norms

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 6)).astype(np.float32)
W, BIAS = RNG.standard_normal((5, 6)), RNG.standard_normal(5)
A, B, M = RNG.standard_normal((4, 6)), RNG.standard_normal((5, 4)), 1 + RNG.random(5)
KEY = jax.random.key(0)


def base(dtype=jnp.float32, param_dtype=jnp.float32) -> Linear:
    layer = Linear(6, 5, use_bias=True, dtype=dtype, param_dtype=param_dtype, rngs=None)
    layer.weight[...] = jnp.asarray(W, param_dtype)
    assert layer.bias is not None
    layer.bias[...] = jnp.asarray(BIAS, param_dtype)
    return layer


def lora(b=B, magnitude=None, linear=None, **options) -> LoraLinear:
    magnitude = None if magnitude is None else jnp.asarray(magnitude, jnp.float32)
    a, b = jnp.asarray(A, jnp.float32), jnp.asarray(b, jnp.float32)
    return LoraLinear(linear or base(), a, b, alpha=6.0, magnitude=magnitude, **options)


@pytest.mark.by_default("True-3.0")
@pytest.mark.parametrize(("rslora", "scale"), [(False, 6 / 4), (True, 6 / 2)])
def test_lora(rslora, scale):
    layer = lora(rslora=rslora)
    assert layer.scale == scale
    np.testing.assert_allclose(layer(X), X @ (W + scale * B @ A).T + BIAS, rtol=1e-5, atol=1e-5)


def test_dora():
    total = W + 1.5 * B @ A
    weight = M[:, None] * total / np.linalg.norm(total, axis=1, keepdims=True)
    np.testing.assert_allclose(lora(magnitude=M)(X), X @ weight.T + BIAS, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("magnitude", [None, M])
def test_merged_is_a_plain_linear_with_the_same_output(magnitude):
    layer = lora(magnitude=magnitude)
    plain = layer.merged()
    assert type(plain) is Linear
    assert jax.tree.structure(plain) == jax.tree.structure(base())
    np.testing.assert_allclose(plain(X), layer(X), rtol=1e-5, atol=1e-5)


def test_merged_keeps_the_dtype_and_sums_in_float32():
    half = lora(linear=base(param_dtype=jnp.bfloat16)).merged()
    weight = np.asarray(base(param_dtype=jnp.bfloat16).weight[...], np.float32) + 1.5 * B @ A
    assert half.weight[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(half.weight[...], weight.astype(jnp.bfloat16))


@pytest.mark.ci
def test_computes_in_the_dtype_of_the_base():
    assert lora(linear=base(dtype=jnp.bfloat16), magnitude=M)(X).dtype == jnp.bfloat16


@pytest.mark.by_default("magnitude1")
@pytest.mark.parametrize("magnitude", [None, np.linalg.norm(W, axis=1)])
def test_zero_b_changes_nothing(magnitude):
    layer = lora(b=np.zeros_like(B), magnitude=magnitude, dropout_rate=0.5)
    np.testing.assert_allclose(layer(X), base()(X), atol=1e-5)
    np.testing.assert_allclose(layer(X, KEY), base()(X), atol=1e-5)


def test_dropout_is_on_the_change_only():
    layer = lora(dropout_rate=0.5)
    dropped = np.asarray(dropout(jnp.asarray(X), 0.5, KEY))
    expected = X @ W.T + BIAS + 1.5 * dropped @ A.T @ B.T
    np.testing.assert_allclose(layer(X, KEY), expected, rtol=1e-5, atol=1e-5)


def test_dropout_of_dora_is_on_all_that_is_added():
    """PEFT's formula: y + (ratio - 1) W x' + ratio s B A x' with x' the dropped input."""
    layer = lora(magnitude=M, dropout_rate=0.5)
    dropped = np.asarray(dropout(jnp.asarray(X), 0.5, KEY))
    ratio = M / np.linalg.norm(W + 1.5 * B @ A, axis=1)
    expected = X @ W.T + BIAS + (ratio - 1) * (dropped @ W.T)
    expected += ratio * 1.5 * (dropped @ A.T @ B.T)
    np.testing.assert_allclose(layer(X, KEY), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_dora_takes_the_row_norms_for_constants():
    def loss(layer):
        return jnp.sum(layer(X) ** 2)

    def with_constant(layer):
        weight = layer.weight[...] + 1.5 * layer.lora_b[...] @ layer.lora_a[...]
        ratio = layer.lora_magnitude[...] / np.linalg.norm(W + 1.5 * B @ A, axis=1)
        return jnp.sum((X @ (ratio[:, None] * weight).T + layer.bias[...]) ** 2)

    layer = lora(magnitude=M)
    actual, expected = jax.grad(loss)(layer), jax.grad(with_constant)(layer)
    for name in ("lora_a", "lora_b", "lora_magnitude"):
        x, y = (getattr(g, name)[...] for g in (actual, expected))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.ci
def test_a_row_of_zeros_stays_finite():
    linear = base()
    linear.weight[...] = linear.weight[...].at[2].set(0)
    layer = lora(b=np.zeros_like(B), magnitude=row_norms(linear.weight[...]), linear=linear)
    assert np.isfinite(layer(X)).all()
    assert np.isfinite(layer.merged()(X)).all()
    grads = jax.grad(lambda layer: layer(X).sum())(layer)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_shares_the_arrays_of_its_base():
    linear = base()
    layer = lora(linear=linear)
    assert layer.weight[...] is linear.weight[...]
    assert isinstance(layer, Linear)
