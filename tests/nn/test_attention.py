"""Attention written out, against its formula and against the fused implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache.kv_cache import KV
from jaxllm.nn.attention import Scores, attend, attend_with_weights, attend_xla

B, T, S, N, H = 3, 5, 7, 4, 8


def made(kv_heads: int, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, T, N, H)).astype(np.float32)
    k, v = rng.standard_normal((2, B, S, kv_heads, H)).astype(np.float32)
    visible = rng.random((B, 1, T, S)) < 0.6
    visible[1, 0, 2] = False  # a query that sees nothing
    visible[2] = False  # a row that sees nothing
    bias = rng.standard_normal((1, N, T, S)).astype(np.float32)
    kv = KV.from_sequence(jnp.asarray(k, dtype), jnp.asarray(v, dtype))
    return jnp.asarray(q, dtype), kv, jnp.asarray(visible), jnp.asarray(bias), k, v


def by_formula(q, k, v, visible, bias, scale):
    """One query at a time, in float64."""
    out, weights = np.zeros((B, T, N, H)), np.zeros((B, N, T, S))
    for b, t, n in np.ndindex(B, T, N):
        group = n // (N // k.shape[2])
        see = np.asarray(visible)[b, 0, t]
        if see.any():
            scores = k[b, :, group].astype(np.float64) @ q[b, t, n] * scale
            scores = scores + (0 if bias is None else np.asarray(bias)[0, n, t])
            p = np.where(see, np.exp(scores - scores[see].max()), 0)
            weights[b, n, t] = p / p.sum()
            out[b, t, n] = weights[b, n, t] @ v[b, :, group]
    return out, weights


@pytest.mark.by_default("True-2")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_formula(kv_heads, biased):
    q, kv, visible, bias, k, v = made(kv_heads)
    bias = bias if biased else None
    with jax.default_matmul_precision("highest"):
        out, weights = attend_with_weights(q, kv, visible=visible, bias=bias, scores=Scores(0.3))
        fused = attend_xla(q, kv, visible=visible, bias=bias, scale=0.3)
    expected = by_formula(np.asarray(q), k, v, visible, bias, 0.3)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(weights, expected[1], atol=1e-6)
    np.testing.assert_allclose(fused, expected[0], atol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("implementation", ["eager", "xla"])
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(dtype, implementation):
    q, kv, visible, bias, _, _ = made(2, dtype)

    def run(q, kv, bias):
        if implementation == "eager":
            return attend(q, kv, visible, bias, scores=Scores(1.0))
        return attend_xla(q, kv, visible=visible, bias=bias, scale=1.0)

    out = np.asarray(run(q, kv, bias), np.float32)
    assert np.isfinite(out).all()
    assert (out[2] == 0).all()
    assert (out[1, 2] == 0).all()
    assert (out[0] != 0).all()
    grads = jax.grad(lambda *x: run(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, kv, bias)
    for gradient in jax.tree.leaves(grads):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    assert (np.asarray(grads[0][2], np.float32) == 0).all()


@pytest.mark.ci
def test_huge_scores_in_half_precision_stay_finite():
    """Scores and softmax are float32: 300 * 300 * 8 is beyond float16."""
    q, kv, visible, _, _, _ = made(4, jnp.float16)
    loud = KV(kv.k * 300, kv.v)
    out, weights = attend_with_weights(q * 300, loud, visible=visible, scores=Scores(1.0))
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert np.isfinite(np.asarray(weights, np.float32)).all()


@pytest.mark.ci
def test_weights_dropout_and_head_mask():
    q, kv, visible, _, _, _ = made(2)
    plain, weights = attend_with_weights(q, kv, visible=visible, scores=Scores(0.3))
    key = jax.random.key(0)
    _, dropped = attend_with_weights(
        q, kv, visible=visible, scores=Scores(0.3), dropout_rate=0.5, key=key
    )
    kept = np.asarray(dropped) != 0
    np.testing.assert_allclose(np.asarray(dropped)[kept], 2 * np.asarray(weights)[kept], rtol=1e-6)
    seen = np.asarray(weights) > 0
    assert 0.35 < kept[seen].mean() < 0.65
    mask = jnp.array([1.0, 0.0, 0.5, 1.0])
    out, masked = attend_with_weights(q, kv, visible=visible, scores=Scores(0.3), head_mask=mask)
    np.testing.assert_allclose(masked, weights * mask[None, :, None, None], rtol=1e-6)
    np.testing.assert_allclose(out, plain * mask[:, None], atol=1e-6)
