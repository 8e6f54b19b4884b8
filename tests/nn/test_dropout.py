"""Dropout is a function of its key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.dropout import dropout, split


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_statistics(rate):
    x = jnp.full((200, 500), 3.0)
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    kept = y != 0
    assert kept.mean() == pytest.approx(1 - rate, abs=0.005)
    np.testing.assert_allclose(y[kept], 3.0 / (1 - rate), rtol=1e-6)
    assert y.mean() == pytest.approx(3.0, abs=0.1)


def test_the_key_decides():
    x = jnp.ones((50, 50))
    a, b = (dropout(x, 0.5, jax.random.key(seed)) for seed in (0, 1))
    np.testing.assert_array_equal(a, dropout(x, 0.5, jax.random.key(0)))
    assert 0.4 < float((a != b).mean()) < 0.6


def test_off_without_a_key_or_a_rate():
    x = jnp.ones(4)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_keeps_the_dtype():
    assert dropout(jnp.ones(4, jnp.bfloat16), 0.5, jax.random.key(0)).dtype == jnp.bfloat16


def test_split_gives_independent_keys():
    assert split(None, 3) == (None, None, None)
    keys = split(jax.random.key(0), 3)
    assert len({float(jax.random.uniform(key)) for key in keys if key is not None}) == 3
