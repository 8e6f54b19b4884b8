"""Masks of the tokens that top-k, top-p and the other sampling filters keep, without sorting.

Sorting 50,000 scores takes ten times longer than the rest of a filter. Two exact methods replace
it:

- ``lax.top_k`` finds the ``CANDIDATES`` largest scores; usually the kept tokens are among them.
- Otherwise bisection finds the threshold: the bits of float32 numbers, with the sign mapped, sort
  as unsigned integers in the same order, so 32 passes over the scores determine its 32 bits.

Sums of probabilities are float32 (XLA adds in blocks; relative error about 1e-7). So a sum within
1e-6 of p counts as p: of 0.5, 0.3, 0.1, 0.1, top-p 0.8 keeps two tokens, although their sum is
below 0.8 in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

CANDIDATES = 128
"""Number of largest scores that ``lax.top_k`` finds before falling back to bisection."""
_ROUNDING = 1e-6  # relative; sums of probabilities this close to the target reach it


def ordered_bits(x: Float[Array, " ..."]) -> UInt32[Array, " ..."]:
    """Maps float32 numbers to unsigned integers of the same order (-0 as 0)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def from_ordered_bits(bits: UInt32[Array, " ..."]) -> Float[Array, " ..."]:
    """Inverse of :func:`ordered_bits`; some bit patterns are NaN."""
    negative = bits >> 31 == 0
    return lax.bitcast_convert_type(
        jnp.where(negative, ~bits, bits & jnp.uint32((1 << 31) - 1)), jnp.float32
    )


def threshold(
    x: Float[Array, "B V"],
    weights: Float[Array, "B V"] | Float[Array, ""] | float,
    target: Float[Array, " B"],
) -> Float[Array, " B"]:
    """Largest number t such that the weights at ``x >= t`` add up to at least ``target``.

    With weights 1 and target k it is the k-th largest of ``x``; with probabilities and target p it
    is the least value of the smallest set of largest ``x`` whose mass reaches p. The result is
    always one of the row's values: the largest if every t qualifies, the smallest if none does.
    """

    def reaches(t: Float[Array, " B"]) -> Bool[Array, " B"]:
        return jnp.sum(jnp.where(x >= t[:, None], weights, 0.0), axis=-1) >= target

    def fix_bit(i: Int[Array, ""], bits: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        candidate = bits | (jnp.uint32(1 << 31) >> jnp.asarray(i, jnp.uint32))
        return jnp.where(reaches(from_ordered_bits(candidate)), candidate, bits)

    bits = lax.fori_loop(0, 32, fix_bit, jnp.zeros(x.shape[0], jnp.uint32))
    # Clipped as bits, since bit patterns beyond infinity are NaN.
    bits = jnp.clip(bits, ordered_bits(jnp.min(x, -1)), ordered_bits(jnp.max(x, -1)))
    t = from_ordered_bits(bits)[:, None]
    # Where subnormal numbers compare as 0, t may be slightly above the value in the row.
    return jnp.min(jnp.where(x >= t, x, jnp.inf), axis=-1)


def as_column(x: Array) -> Array:
    """Reshapes a scalar to [1, 1], or one value per row to [B, 1], to broadcast with [B, V]."""
    return jnp.reshape(x, (-1, 1))


def kth_largest(x: Float[Array, "B V"], k: Int[Array, "*B"]) -> Float[Array, " B"]:
    """The ``k``-th largest value of each row, counting ties; ``k`` is traced, 1 to V."""
    width, row_k = min(CANDIDATES, x.shape[1]), jnp.broadcast_to(k, x.shape[:1])

    def among_candidates() -> Float[Array, " B"]:
        return _pick(lax.top_k(x, width)[0], jnp.minimum(row_k, width) - 1)

    def by_bisection() -> Float[Array, " B"]:
        return threshold(x, 1.0, row_k.astype(jnp.float32))

    return lax.cond(jnp.all(row_k <= width), among_candidates, by_bisection)


def top_k_mask(x: Float[Array, "B V"], k: Int[Array, "*B"]) -> Bool[Array, "B V"]:
    """True at the ``k`` largest of each row and at ties with the k-th."""
    return x >= kth_largest(x, k)[:, None]


def top_p_mask(x: Float[Array, "B V"], p: Float[Array, "*B"], least: int = 1) -> Bool[Array, "B V"]:
    """True at the fewest largest scores whose probabilities add up to ``p`` (within 1e-6) or more.

    Among equal scores at the threshold, the later columns are kept, as by a stable ascending sort
    that drops from the front. At least ``least`` are kept.
    """
    weights = unnormalised(x)
    mass = p * (1 - _ROUNDING) * jnp.sum(weights, axis=-1)
    width = min(CANDIDATES, x.shape[1])
    least = min(least, x.shape[1])
    top, top_columns = lax.top_k(x, max(width, least))
    top_weights = jnp.take_along_axis(weights, top_columns, axis=1)
    cumulative = jnp.cumsum(top_weights, axis=-1)

    def among_candidates() -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        # A token is kept if the mass of the larger ones is below the target.
        count = jnp.sum(cumulative - top_weights < mass[:, None], axis=-1)
        edge = _pick(top, jnp.maximum(count, least) - 1)
        above = jnp.sum(top > edge[:, None], axis=-1)
        return edge, (jnp.maximum(count, least) - above).astype(jnp.float32)

    def by_bisection() -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        # On the weights alone, since reading one array is twice as fast as reading two.
        edge_weight = threshold(weights, weights, mass)[:, None]
        missing = mass - jnp.sum(jnp.where(weights > edge_weight, weights, 0.0), axis=-1)
        weight = jnp.maximum(edge_weight[:, 0], jnp.finfo(jnp.float32).tiny)
        count = jnp.maximum(jnp.ceil(missing / weight), 1.0)
        at_edge = weights == edge_weight
        count = jnp.minimum(count, jnp.sum(at_edge, axis=-1))
        edge = _kth_of_equal_weight(x, at_edge, count)
        edge = jnp.minimum(edge, top[:, least - 1])
        above = jnp.sum(x > edge[:, None], axis=-1)
        count += jnp.sum(weights > edge_weight, axis=-1)
        return edge, jnp.maximum(count, least) - above

    enough = (x.shape[1] <= width) | jnp.all(cumulative[:, -1] >= mass)
    edge, count_at_edge = lax.cond(enough, among_candidates, by_bisection)
    return x >= _later_of_equals(x, edge, jnp.maximum(count_at_edge, 1))


def _kth_of_equal_weight(
    x: Float[Array, "B V"], group: Bool[Array, "B V"], k: Float[Array, " B"]
) -> Float[Array, " B"]:
    """The k-th largest x of a group; fast if the whole group is kept or its members are equal."""
    smallest = jnp.min(jnp.where(group, x, jnp.inf), axis=-1)
    largest = jnp.max(jnp.where(group, x, -jnp.inf), axis=-1)
    split = (k < jnp.sum(group, axis=-1)) & (smallest < largest)
    return lax.cond(
        jnp.any(split),
        lambda: threshold(jnp.where(group, x, -jnp.inf), 1.0, k),
        lambda: smallest,
    )


def _later_of_equals(
    x: Float[Array, "B V"], edge: Float[Array, " B"], count: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Lower bound per token: ``edge``, but infinity at ties that are not the last ``count``."""
    tied = x == edge[:, None]

    def split() -> Float[Array, "B V"]:
        # Positions below 2**24 are exact in float32, so the same bisection finds the last `count`.
        position = jnp.where(tied, jnp.arange(x.shape[1], dtype=jnp.float32), -1.0)
        first = threshold(position, 1.0, count)[:, None]
        return jnp.where(tied & (position < first), jnp.inf, edge[:, None])

    several = jnp.any(jnp.sum(tied, axis=-1) > count)
    return lax.cond(several, split, lambda: jnp.broadcast_to(edge[:, None], x.shape))


def nearest_mask(
    distance: Float[Array, "B V"],
    weights: Float[Array, "B V"],
    mass: Float[Array, " B"],
    least: int = 1,
) -> Bool[Array, "B V"]:
    """True at the smallest distances, up to where the summed weights reach ``mass`` (within 1e-6).

    Ties with it are kept. At least ``least`` are kept, earlier columns first among equals.
    """
    nearness = -distance
    mask = nearness >= threshold(nearness, weights, mass * (1 - _ROUNDING))[:, None]
    _, nearest = lax.top_k(nearness, min(least, nearness.shape[1]))
    return mask | _mask_of(nearest, nearness.shape[1])


def top_mask(x: Float[Array, "B V"], count: int) -> Bool[Array, "B V"]:
    """True at the ``count`` largest of each row and at ties with the last of them."""
    if count == 1:
        return x >= jnp.max(x, axis=-1, keepdims=True)
    return x >= lax.top_k(x, min(count, x.shape[1]))[0][:, -1:]


def entropy_mask(x: Float[Array, "B V"], fraction: Float[Array, "*B"]) -> Bool[Array, "B V"]:
    """Top-h: True at the largest scores while their summed -p log p is <= fraction * entropy.

    Uses the 100 largest scores only, renormalised; the largest is always kept.
    """
    top, columns = lax.top_k(x, min(100, x.shape[1]))
    p = jax.nn.softmax(top, axis=-1)
    terms = jnp.where(p > 0, -p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)
    budget = as_column(fraction) * jnp.sum(terms, axis=-1, keepdims=True)
    keep = (jnp.cumsum(terms, axis=-1) <= budget) & (p > 0)
    return _mask_of(jnp.where(keep.at[:, 0].set(True), columns, x.shape[1]), x.shape[1])


def unnormalised(x: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Probabilities divided by the row's largest, which becomes 1; a row of -inf gives zeros."""
    largest = jnp.max(x, axis=-1, keepdims=True)
    return jnp.exp(x - jnp.where(jnp.isfinite(largest), largest, 0.0))


def _pick(rows: Float[Array, "B n"], column: Int[Array, " B"]) -> Float[Array, " B"]:
    return jnp.take_along_axis(rows, column[:, None], axis=1)[:, 0]


def _mask_of(columns: Int[Array, "B n"], width: int) -> Bool[Array, "B width"]:
    rows = jnp.arange(columns.shape[0])[:, None]
    return jnp.zeros((columns.shape[0], width), bool).at[rows, columns].set(True, mode="drop")
