"""Dropout is a function of its key."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.linear import LEVELS, dropout, dropout_mask, split_key
from jaxllm.nn.platform.training import counters, random_uint16


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


@pytest.mark.by_default("shape3")
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 7), (2, 1, 3), (0, 4)])
def test_any_shape(shape):
    """Four rows share their hashes, whether or not their number is a multiple of four."""
    assert dropout_mask(jax.random.key(0), LEVELS // 2, shape).shape == shape


def test_numbers_of_one_hash_are_independent():
    numbers = np.asarray(random_uint16(jax.random.key(1), (2, 400, 500)))
    assert numbers.dtype == np.uint16
    dropped = (numbers < LEVELS // 10).reshape(2, 4, -1)
    assert dropped.mean(axis=-1) == pytest.approx(np.full((2, 4), 0.1), abs=0.004)
    for one, other in itertools.combinations(dropped.reshape(8, -1), 2):
        assert (one & other).mean() == pytest.approx(0.01, abs=0.002)


def test_the_numbers_of_a_key_do_not_change():
    """Runs with a seed give the same results in later versions."""
    expected = [[[6197, 34934], [43281, 59503], [7743, 29737], [37260, 54446], [8322, 32840]]]
    expected += [[[56372, 13400], [5937, 31466], [16947, 57044], [35853, 21132], [40811, 51321]]]
    with jax.threefry_partitionable(False):
        other = random_uint16(jax.random.key(1), (2, 5, 2))
    for numbers in (random_uint16(jax.random.key(1), (2, 5, 2)), other):
        np.testing.assert_array_equal(numbers, expected)


@pytest.mark.ci
def test_every_hash_is_of_another_number():
    pairs = np.stack([np.asarray(x).ravel() for x in counters((2, 3, 4, 5))], axis=1)
    assert len(np.unique(pairs, axis=0)) == 2 * 3 * 4 * 5


@pytest.mark.ci
def test_keys_of_other_generators():
    key = jax.random.key(0, impl="rbg")
    dropped = np.asarray(dropout_mask(key, LEVELS // 10, (200, 500)))
    assert (~dropped).mean() == pytest.approx(0.1, abs=0.005)


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
