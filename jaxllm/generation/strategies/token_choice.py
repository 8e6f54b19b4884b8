"""Chooses the next token from processed scores."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def choose_greedy(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Best token of each row, int32 ``[B]``; ties go to the first. Scores hold no NaN.

    >>> import jax.numpy as jnp
    >>> choose_greedy(jnp.array([[1.0, 3.0, 3.0]])).tolist()
    [1]
    """
    # Two steps take a third of the time of one argmax on a CPU. The second does not search for the
    # value that the first found: XLA may recompute the scores for it, and round them differently.
    blocks, size = _split(scores, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return (block * size + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def choose_sample(keys: Key[Array, " B"], scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Draws one token from softmax(scores) for each row, with the row's own key.

    The draw has two steps, each among about sqrt(V) items, which needs 450 random numbers at a
    vocabulary of 50,000 instead of one for every token: first a block of tokens by its summed
    probability, then a token within the block. Each step is an exponential race: the smallest of
    ``E_i / w_i`` with E_i independent and exponential is item i with probability w_i / sum(w).
    No cumulative sums are taken, whose rounding would make tokens of small probability unreachable.

    Args:
        keys: Typed PRNG keys, one per row. A row's draw depends on its key and scores only.
        scores: ``[B, V]``; a row has at least one finite score, and no NaN or +inf.

    Returns:
        int32 ``[B]``. A token of score -inf is never chosen. Probabilities are exact up to float32
        rounding; an item whose share of its step is below 2**-33 or so may not be reachable.
    """
    weights, size = _in_blocks(scores)
    block, within = _race(keys, weights)
    return (block * size + within).astype(jnp.int32)


def draw_without_replacement(
    keys: Key[Array, " B"],
    scores: Float[Array, "B V"],
    places: int,
    count: Int[Array, ""] | Int[Array, " B"],
    *,
    worst: float,
) -> tuple[Float[Array, "B P"], Int[Array, "B P"]]:
    """Draws `count` different items of softmax(scores), one by one: their scores and indices.

    `count` is one number, or one per row. Equal in distribution to
    `torch.multinomial(..., replacement=False)`. Entries beyond `count`, or beyond the items of
    positive probability, have the score `worst`.
    """
    batch = scores.shape[0]
    weights, size = _in_blocks(scores)

    def draw(i, carry):
        weights, value, index = carry
        each = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, i)
        block, within = _race(each, weights)
        row = jnp.arange(batch)
        left = (weights[row, block, within] > 0) & (i < count)
        item = block * size + within
        found = jnp.where(left, scores[row, item], worst)
        weights = weights.at[row, block, within].set(0.0)
        return weights, value.at[:, i].set(found), index.at[:, i].set(item)

    empty = jnp.full((batch, places), worst, jnp.float32), jnp.zeros((batch, places), jnp.int32)
    most = jnp.minimum(jnp.max(count), places)
    _, value, index = jax.lax.fori_loop(0, most, draw, (weights, *empty))
    return value, index


def _in_blocks(scores: Float[Array, "B V"]) -> tuple[Float[Array, "B blocks size"], int]:
    """exp(scores) in blocks, scaled to a maximum of 1; and the size of a block."""
    scores = scores.astype(jnp.float32)
    return _split(jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0.0)


def _split(x: Float[Array, "B V"], filler: float) -> tuple[Float[Array, "B blocks size"], int]:
    """Splits rows into about sqrt(V) blocks, the last one padded; and the size of a block."""
    batch, vocab_size = x.shape
    size = math.isqrt(vocab_size - 1) + 1
    blocks = -(-vocab_size // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - vocab_size)), constant_values=filler)
    return x.reshape(batch, blocks, size), size


def _race(
    keys: Key[Array, " B"], weights: Float[Array, "B blocks size"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Draws a block and an index in it, each with probability proportional to its weight."""
    _, blocks, size = weights.shape
    times = jax.vmap(lambda key: _exponential(key, blocks + size))(keys)
    block = jnp.argmin(times[:, :blocks] / jnp.sum(weights, axis=-1), axis=-1)
    inside = jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0]
    return block, jnp.argmin(times[:, blocks:] / inside, axis=-1)


def _exponential(key: Key[Array, ""], count: int) -> Float[Array, " count"]:
    """Standard exponential numbers, positive, finite, and fine-grained near 0 (from 2**-33).

    Small ones win the race, so the uniform numbers that they come from use all 32 bits;
    ``jax.random.exponential`` uses 23.
    """
    bits = jax.random.bits(key, (count,), jnp.uint32)
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
