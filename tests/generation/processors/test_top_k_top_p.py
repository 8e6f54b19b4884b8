"""Cuts through a vocabulary against references that sort, in float64 where sums are concerned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.generation.processors.warpers import (
    CANDIDATES,
    entropy_mask,
    from_ordered_bits,
    kth_largest,
    nearest_mask,
    ordered_bits,
    threshold,
    top_k_mask,
    top_mask,
    top_p_mask,
)

SIZES = [1, 23, 131, 300]
FAST = settings(max_examples=15, deadline=None)

jit_threshold = jax.jit(threshold)
jit_kth = jax.jit(kth_largest)
jit_top_k = jax.jit(top_k_mask)
jit_top_p = jax.jit(top_p_mask, static_argnums=2)
jit_nearest = jax.jit(nearest_mask, static_argnums=3)
jit_entropy = jax.jit(entropy_mask)


@st.composite
def rows(draw, sizes=tuple(SIZES)):
    """Two rows of scores: smooth, heavily tied, flat, peaked, or with many -inf."""
    size = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["smooth", "tied", "flat", "peaked", "masked"]))
    x = rng.normal(size=(2, size)) * 3
    if kind == "tied":
        x = np.round(x)
    elif kind == "flat":
        x = np.zeros_like(x)
    elif kind == "peaked":
        x[:, rng.integers(size)] += 60
    elif kind == "masked":
        hidden = rng.random(x.shape) < 0.7
        hidden[:, rng.integers(size)] = False
        x[hidden] = -np.inf
    return x.astype(np.float32)


def reference_top_p(row: np.ndarray, p: float, least: int) -> np.ndarray:
    """The rule as transformers states it: ascending stable sort, cumulative sum, drop <= 1-p."""
    order = np.argsort(row, kind="stable")
    ordered = row[order].astype(np.float64)
    weights = np.exp(ordered - ordered[-1])
    drop = np.cumsum(weights) <= (1 - np.float64(np.float32(p))) * weights.sum()
    drop[-least:] = False
    keep = np.empty(len(row), bool)
    keep[order] = ~drop
    return keep


def near_edge(row: np.ndarray, p: float) -> bool:
    """Whether some partial sum is so near the cut that float32 may decide either way."""
    weights = np.sort(np.exp(row.astype(np.float64) - row.max()))
    share = np.cumsum(weights) / weights.sum()
    return bool(np.any(np.abs(share - (1 - p)) < 3e-6))


@pytest.mark.ci
@FAST
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40))
def test_bits_keep_the_order_and_come_back(numbers):
    x = np.array(numbers, np.float32)
    x[np.abs(x) < np.finfo(np.float32).tiny] = 0  # subnormals may be flushed
    bits = np.asarray(ordered_bits(jnp.asarray(x)))
    np.testing.assert_array_equal(np.asarray(from_ordered_bits(jnp.asarray(bits))), x)
    smaller = x[:, None] < x[None]
    np.testing.assert_array_equal(smaller, bits[:, None] < bits[None])


def test_minus_zero_equals_zero():
    bits = np.asarray(ordered_bits(jnp.array([-0.0, 0.0])))
    assert bits[0] == bits[1]


@pytest.mark.ci
@FAST
@given(rows(), st.data())
def test_kth_largest_is_that_of_a_sort(x, data):
    k = data.draw(st.integers(1, x.shape[1]))
    expected = np.sort(x, axis=1)[:, -k]
    np.testing.assert_array_equal(np.asarray(jit_kth(x, np.int32(k))), expected)
    by_bisection = jit_threshold(x, 1.0, jnp.full(2, k, jnp.float32))
    np.testing.assert_array_equal(np.asarray(by_bisection), expected)
    np.testing.assert_array_equal(np.asarray(jit_top_k(x, np.int32(k))), x >= expected[:, None])


@pytest.mark.in_ci("1")
@pytest.mark.parametrize("k", [1, CANDIDATES, CANDIDATES + 1, 299, 300])
def test_kth_largest_on_both_sides_of_the_candidates(k):
    x = np.random.default_rng(k).normal(size=(3, 300)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jit_kth(x, np.int32(k))), np.sort(x, 1)[:, -k])


def test_threshold_outside_the_reachable_range():
    x = jnp.array([[3.0, -jnp.inf, 1.0, -2.0]])
    assert jit_threshold(x, 1.0, jnp.array([0.0])).tolist() == [3.0]
    assert jit_threshold(x, 1.0, jnp.array([9.0])).tolist() == [-jnp.inf]
    infinite = jnp.array([[jnp.inf, 1.0]])
    assert jit_threshold(infinite, 1.0, jnp.array([1.0])).tolist() == [jnp.inf]


@pytest.mark.ci
@FAST
@given(rows(), st.sampled_from([0.0, 1e-6, 0.05, 0.3, 0.5, 0.9, 0.95, 0.999]), st.integers(1, 3))
def test_top_p_keeps_what_a_stable_sort_keeps(x, p, least):
    keep = np.asarray(jit_top_p(x, np.float32(p), least))
    for row, actual in zip(x, keep, strict=True):
        if p == 0 or not near_edge(row, p):
            expected = reference_top_p(row, p, least) & np.isfinite(row)
            np.testing.assert_array_equal(actual & np.isfinite(row), expected)
        assert actual.sum() >= min(least, len(row))


@pytest.mark.in_ci("0-0.0-1", "0-0.0-3")
@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.93, 0.999])
@pytest.mark.parametrize("rounding", [0, 1, 3])
def test_top_p_beyond_the_candidates(p, least, rounding):
    """Nearly flat rows: the cut lies far below the 128 best, with ties at low precision."""
    x = np.random.default_rng(5).normal(size=(4, 3001)) * 0.7
    x = np.round(x, rounding).astype(np.float32)
    keep = np.asarray(jit_top_p(x, np.float32(p), least))
    for row, actual in zip(x, keep, strict=True):
        expected = reference_top_p(row, p, least)
        # One of about 3000 equally likely tokens may lie within rounding of the cut.
        assert np.sum(actual != expected) <= 1


@pytest.mark.ci
def test_top_p_is_reached_by_a_sum_that_only_rounding_keeps_below():
    x = jnp.log(jnp.array([[0.3, 0.1, 0.1, 0.5], [0.15, 0.3, 0.3, 0.25]]))
    kept = jit_top_p(x, jnp.float32(0.8), 1)
    assert kept.tolist() == [[True, False, False, True], [False, True, True, True]]
    with_tail = jnp.pad(x, ((0, 0), (0, 300)), constant_values=-jnp.inf)
    np.testing.assert_array_equal(jit_top_p(with_tail, jnp.float32(0.8), 1)[:, :4], kept)


@pytest.mark.ci
def test_top_p_of_equals_keeps_the_later_ones():
    keep = jit_top_p(jnp.zeros((1, 8)), jnp.float32(0.4), 1)
    assert np.flatnonzero(keep[0]).tolist() == [4, 5, 6, 7]  # half of 8 reach 0.4, three do not


@pytest.mark.ci
@FAST
@given(rows(), st.sampled_from([0.05, 0.2, 0.5, 0.9, 0.99]), st.integers(1, 3))
def test_nearest_keeps_what_a_sort_keeps(x, mass, least):
    weights = np.exp(x - x.max(1, keepdims=True))
    distance = np.abs(np.where(np.isfinite(x), x, np.inf) - 0.5).astype(np.float32)
    target = np.float32(mass) * weights.sum(1)
    keep = np.asarray(jit_nearest(distance, weights, target, least))
    for d, w, t, actual in zip(distance, weights, target, keep, strict=True):
        order = np.argsort(d, kind="stable")
        reached = np.cumsum(w[order].astype(np.float64))
        if np.any(np.abs(reached - t) < 3e-6 * reached[-1]):
            continue
        last = min(np.sum(reached < t), len(d) - 1)
        expected = d <= d[order][last]
        expected[order[:least]] = True
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.ci
@FAST
@given(rows(), st.sampled_from([0.05, 0.3, 0.7, 0.97]))
def test_entropy_keeps_what_a_loop_keeps(x, fraction):
    x = x + 0.0  # lax.top_k puts 0 before -0, which is neither right nor wrong
    keep = np.asarray(jit_entropy(x, np.float32(fraction)))
    for row, actual in zip(x, keep, strict=True):
        order = np.argsort(-row, kind="stable")[:100]
        p = np.exp(row[order].astype(np.float64) - row.max())
        p = p[p > 0] / p.sum()
        terms = -p * np.log(p)
        reached = np.cumsum(terms)
        if np.any(np.abs(reached - fraction * terms.sum()) < 1e-5):
            continue
        count = max(1, int(np.sum(reached <= fraction * terms.sum())))
        assert set(np.flatnonzero(actual)) == set(order[:count])


@pytest.mark.ci
@FAST
@given(rows(), st.integers(1, 6))
def test_top_mask_keeps_ties(x, count):
    kth = np.sort(x, axis=1)[:, -min(count, x.shape[1])]
    actual = np.asarray(top_mask(jnp.asarray(x), count))
    np.testing.assert_array_equal(actual, x >= kth[:, None])


@pytest.mark.ci
def test_cuts_work_row_by_row_under_vmap():
    x = np.random.default_rng(0).normal(size=(3, 2, 40)).astype(np.float32)
    k, p = jnp.array([1, 7, 40]), jnp.array([0.0, 0.5, 0.99], jnp.float32)
    by_k = jax.jit(jax.vmap(top_k_mask))(jnp.asarray(x), k)
    by_p = jax.jit(jax.vmap(top_p_mask))(jnp.asarray(x), p)
    for i in range(3):
        np.testing.assert_array_equal(np.asarray(by_k[i]), np.asarray(jit_top_k(x[i], k[i])))
        np.testing.assert_array_equal(np.asarray(by_p[i]), np.asarray(jit_top_p(x[i], p[i], 1)))


def test_masks_in_64_bit_mode():
    """Python numbers are float64 then, and the branches of a condition must still agree."""
    x = np.random.default_rng(3).normal(size=(2, 131)).astype(np.float32)
    x[1] = np.round(x[1])

    def masks():
        by_k = jax.jit(top_k_mask)(x, jnp.array([7, 130], jnp.int32))
        by_p = jax.jit(top_p_mask, static_argnums=2)
        return by_k, by_p(x, np.float32(0.9), 1), by_p(x, np.float32(0.9), 3)

    expected = masks()
    with jax.enable_x64(True):
        actual = masks()
    for mask, other in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(mask, other)


@pytest.mark.slow
def test_top_p_at_the_size_of_a_vocabulary():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(8, 49152)) * 3).astype(np.float32)
    for p in (0.1, 0.5, 0.9, 0.95, 0.99):
        keep = np.asarray(jit_top_p(x, np.float32(p), 1))
        for row, actual in zip(x, keep, strict=True):
            expected = reference_top_p(row, p, 1)
            differing = np.exp(row[actual != expected].astype(np.float64) - row.max())
            assert differing.sum() / np.exp(row.astype(np.float64) - row.max()).sum() < 2e-6


@pytest.mark.ci
def test_top_p_orders_scores_that_have_equal_probabilities():
    """Scores so near the largest that float32 gives all of them the weight 1."""
    step = np.float32(2.0**-27)
    x = np.full((1, 200), 0.0, np.float32)
    x[0, :200] = -step * np.random.default_rng(0).permutation(200)
    keep = np.asarray(jit_top_p(x, np.float32(0.8), 1))[0]
    assert keep.sum() == 160
    assert x[0, keep].min() > x[0, ~keep].max()
