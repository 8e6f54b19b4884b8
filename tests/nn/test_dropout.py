"""Dropout is a function of its key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.linear import LEVELS, dropout, dropout_mask, split_key
from jaxllm.nn.platform.training import split_in_halves


@pytest.mark.in_ci("0.1")
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_statistics(rate):
    x = jnp.full((200, 501), 3.0)
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    kept = y != 0
    assert kept.mean() == pytest.approx(1 - rate, abs=0.005)
    share = 1 - round(rate * LEVELS) / LEVELS
    np.testing.assert_allclose(y[kept], 3.0 / share, rtol=1e-6)
    assert y.mean() == pytest.approx(3.0, abs=0.1)


@pytest.mark.by_default("shape1")
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 7), (0, 4)])
def test_any_shape(shape):
    """Two elements share a random word, whether or not the elements are even in number."""
    assert dropout_mask(jax.random.key(0), LEVELS // 2, shape).shape == shape


def test_elements_of_one_word_are_independent():
    mask = np.asarray(dropout_mask(jax.random.key(1), LEVELS // 10, (100_000, 2)))
    both = (~mask).all(axis=1).mean()
    assert both == pytest.approx(0.01, abs=0.001)
    assert (~mask).mean(axis=0) == pytest.approx([0.1, 0.1], abs=0.004)


@pytest.mark.by_default("shape1")
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (0, 4), (300, 101)])
def test_random_numbers_of_a_tpu(shape):
    """Its two halves of the last axis share random words."""
    numbers = np.asarray(split_in_halves(jax.random.key(1), shape=shape))
    assert (numbers.shape, numbers.dtype) == (shape, np.uint16)
    if numbers.size > 1000:
        dropped = numbers < LEVELS // 10
        assert dropped.mean() == pytest.approx(0.1, abs=0.01)
        both = dropped[:, :50] & dropped[:, 51:]
        assert both.mean() == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize(("platform", "pairs"), [("tpu", 0), ("cpu", 1), ("cuda", 1)])
def test_only_a_tpu_draws_words_in_halves(platform, pairs):
    traced = jax.jit(lambda key: dropout_mask(key, 9, (4, 256))).trace(jax.random.key(0))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("x2xui16>") == 2 * pairs


def test_everything_may_be_dropped():
    x = jnp.ones((3, 3), jnp.bfloat16)
    np.testing.assert_array_equal(dropout(x, 1.0, jax.random.key(0)), jnp.zeros_like(x))


@pytest.mark.ci
def test_the_key_decides():
    x = jnp.ones((50, 50))
    a, b = (dropout(x, 0.5, jax.random.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(a, dropout(x, 0.5, jax.random.key(0)))
    assert 0.4 < float((a != b).mean()) < 0.6


def test_off_without_a_key_or_a_rate():
    x = jnp.ones(4)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.ci
def test_keeps_the_dtype():
    assert dropout(jnp.ones(4, jnp.bfloat16), 0.5, jax.random.key(0)).dtype == jnp.bfloat16


@pytest.mark.ci
def test_split_gives_independent_keys():
    assert split_key(None, 3) == (None, None, None)
    keys = split_key(jax.random.key(0), 3)
    assert len({float(jax.random.uniform(key)) for key in keys if key is not None}) == 3
