"""Choosing tokens: exact probabilities, forbidden tokens, keys, and ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.generation.strategies.draws import choose_greedy, choose_sample

DRAWS = 20_000
sample = jax.jit(choose_sample)


@jax.jit
def many(keys, x):
    return choose_sample(keys, jnp.broadcast_to(x, (len(keys), len(x))))


def row(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    x = rng.normal(size=size).astype(np.float32)
    if kind == "peaked":
        x *= 4
    elif kind == "flat":
        x[:] = 3.0
    elif kind == "masked":
        x[rng.random(size) < 0.9] = -np.inf
        x[0] = 1.0
    return x


def draw(x: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draws from one row, in batches that keep memory small."""
    keys = jax.random.split(jax.random.key(seed), count)
    batch = max(1, 4_000_000 // len(x))

    parts = [many(keys[i : i + batch], x) for i in range(0, count, batch)]
    return np.concatenate(parts)


@pytest.mark.by_default("23-20000-flat", "23-20000-masked")
@pytest.mark.parametrize("kind", ["peaked", "flat", "masked"])
@pytest.mark.parametrize(
    ("size", "count"),
    [(23, DRAWS), (50_000, 1_000), pytest.param(50_000, DRAWS, marks=pytest.mark.slow)],
)
def test_draws_follow_the_probabilities(kind, size, count):
    x = row(kind, size)
    tokens = draw(x, count, seed=11)
    assert np.isfinite(x[tokens]).all()
    p = np.exp(x.astype(np.float64) - x.max())
    p /= p.sum()
    # Cells of about equal expectation: the likely tokens alone, the others joined.
    cell = np.minimum((np.cumsum(p) - p / 2) * 40, 39).astype(int)
    expected = np.bincount(cell, p, minlength=40) * count
    observed = np.bincount(cell[tokens], minlength=40)
    used = expected > 0
    chi2 = np.sum((observed[used] - expected[used]) ** 2 / expected[used])
    freedom = used.sum() - 1
    assert chi2 < freedom + 4.5 * np.sqrt(2 * freedom)  # beyond the 0.9999 quantile


def test_single_cells_of_a_small_vocabulary():
    x = row("peaked", 23)
    p = np.exp(x.astype(np.float64) - x.max())
    p /= p.sum()
    counts = np.bincount(draw(x, DRAWS, seed=3), minlength=23)
    z = (counts - DRAWS * p) / np.sqrt(DRAWS * p * (1 - p))
    assert np.abs(z[DRAWS * p > 5]).max() < 4.5


@pytest.mark.ci
def test_tokens_below_the_resolution_of_a_cumulative_sum_are_drawn():
    """A thousand tokens of 5e-8 each: float32 cannot tell 1 from 1 + 5e-8."""
    x = np.full(1001, np.log(5e-8), np.float32)
    x[0] = 0.0
    expected = 100_000 * 1000 * 5e-8
    tail = np.sum(draw(x, 100_000, seed=0) != 0)
    assert 1 <= tail < expected + 5 * np.sqrt(expected)


@pytest.mark.ci
def test_an_impossible_token_is_never_chosen():
    x = np.full((4096, 37), -np.inf, np.float32)
    x[np.arange(4096), np.arange(4096) % 37] = -80.0
    keys = jax.random.split(jax.random.key(5), 4096)
    np.testing.assert_array_equal(sample(keys, x), np.arange(4096) % 37)


@pytest.mark.ci
def test_a_row_depends_on_its_key_and_scores_only():
    x = jax.random.normal(jax.random.key(1), (8, 1000))
    keys = jax.random.split(jax.random.key(2), 8)
    together = np.asarray(sample(keys, x))
    single = np.array([sample(keys[i : i + 1], x[i : i + 1])[0] for i in range(8)])
    np.testing.assert_array_equal(together, single)
    np.testing.assert_array_equal(together, sample(keys, x))
    other = np.asarray(sample(jax.random.split(jax.random.key(3), 8), x))
    assert (other != together).any()


@pytest.mark.by_default("1")
@pytest.mark.parametrize("size", [1, 2, 3, 17])
def test_every_token_can_be_drawn(size):
    assert set(draw(np.zeros(size, np.float32), 20 * size, seed=1)) == set(range(size))


def test_greedy_takes_the_first_of_equals():
    scores = jnp.array([[0.0, 2.0, 2.0], [-jnp.inf, -jnp.inf, -1.0]])
    tokens = choose_greedy(scores)
    assert tokens.tolist() == [1, 2]
    assert tokens.dtype == jnp.int32


@pytest.mark.ci
def test_the_best_of_scores_that_are_computed_along_the_way():
    """XLA may compute them anew for each use, rounded otherwise; the best is found all the same."""
    rng = np.random.default_rng(0)
    above, below, draft = (rng.normal(0, 3, (1000, 4, 50)).astype(np.float32) for _ in range(3))

    def mixture(above, below, draft):
        above, below = jax.nn.log_softmax(above), jax.nn.log_softmax(below)
        p, q = jax.nn.softmax(below + 1.6 * (above - below)), jax.nn.softmax(draft)
        drafted = (jnp.arange(4) < 3)[:, None]
        return jnp.where(drafted, 0.4 * p + 0.6 * q, p).reshape(4000, 50)

    def chosen(*scores):
        return choose_greedy(mixture(*scores))

    scores = np.asarray(mixture(*map(jnp.asarray, (above, below, draft))))
    tokens = jax.jit(chosen)(above, below, draft)
    best = np.take_along_axis(scores, tokens[:, None], axis=1)[:, 0]
    np.testing.assert_allclose(best, scores.max(axis=1), rtol=1e-5)


def test_only_a_cpu_finds_the_best_in_two_steps():
    traced = jax.jit(choose_greedy).trace(jax.ShapeDtypeStruct((4, 50_000), jnp.float32))
    reads = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.reduce(")
        for platform in ("cpu", "cuda", "tpu")
    }
    assert reads["cuda"] == reads["tpu"] == 1 < reads["cpu"]
