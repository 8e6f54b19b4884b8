"""Chooses the next token from processed scores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxllm.generation.strategies.strategy import Length
from jaxllm.nn.platform.decoding import argmax_of_rows, block_size, in_blocks, random_bits
from jaxllm.parallel.vocabulary import argmax, has_blocks, race


def choose_greedy(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Best token of each row, int32 ``[B]``; ties go to the first. Scores hold no NaN.

    >>> import jax.numpy as jnp
    >>> choose_greedy(jnp.array([[1.0, 3.0, 3.0]])).tolist()
    [1]
    """
    return argmax(scores, argmax_of_rows)


def choose_sample(
    keys: Key[Array, " B"],
    scores: Float[Array, "B V"],
    step: Length | None = None,
) -> Int[Array, " B"]:
    """Draws one token from softmax(scores) for each row, with the row's own key.

    The draw has two steps, each among about sqrt(V) items, which needs 450 random numbers at a
    vocabulary of 50,000 instead of one for every token: first a block of tokens by its summed
    probability, then a token within the block. Each step is an exponential race: the smallest of
    ``E_i / w_i`` with E_i independent and exponential is item i with probability w_i / sum(w).
    No cumulative sums are taken, whose rounding would make tokens of small probability unreachable.
    Every backend takes the same two steps, since they determine which token a key draws.

    Args:
        keys: typed PRNG keys, one per row. A row's draw depends on its key and scores only.
        scores: ``[B, V]``; a row has at least one finite score, and no NaN or +inf.
        step: draw with ``fold_in(key, step)``; None: with the key itself.

    Returns:
        int32 ``[B]``. A token of score -inf is never chosen. Probabilities are exact up to float32
        rounding; an item whose share of its step is below 2**-33 or so may not be reachable.
    """
    size = block_size(scores.shape[1])
    if has_blocks(scores, size):
        times = _times(keys, step, -(-scores.shape[1] // size) + size)
        return race(_weights(scores), times, size).astype(jnp.int32)
    weights = in_blocks(_weights(scores), 0.0)
    block, within = _race(keys, step, weights)
    return (block * size + within).astype(jnp.int32)


def draw_without_replacement(
    keys: Key[Array, " B"],
    scores: Float[Array, "B V"],
    places: int,
    count: Int[Array, " R"],
    *,
    worst: float,
) -> tuple[Float[Array, "B P"], Int[Array, "B P"]]:
    """Draws `count` different items of softmax(scores), one by one: their scores and indices.

    `count` is one number for all rows, or one for each. Equal in distribution to
    `torch.multinomial(..., replacement=False)`. Entries beyond `count`, or beyond the items of
    positive probability, have the score `worst`.
    """
    batch, weights = scores.shape[0], in_blocks(_weights(scores), 0.0)

    def draw(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weights, value, index = carry
        block, within = _race(keys, i, weights)
        row = jnp.arange(batch)
        is_drawn = (weights[row, block, within] > 0) & (i < count)
        item = block * weights.shape[2] + within
        score = jnp.where(is_drawn, scores[row, item], worst)
        weights = weights.at[row, block, within].set(0.0)
        return weights, value.at[:, i].set(score), index.at[:, i].set(item)

    empty = jnp.full((batch, places), worst, jnp.float32), jnp.zeros((batch, places), jnp.int32)
    draws = jnp.minimum(jnp.max(count), places)
    _, value, index = jax.lax.fori_loop(0, draws, draw, (weights, *empty))
    return value, index


def _weights(scores: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """exp(scores), scaled to a maximum of 1."""
    scores = scores.astype(jnp.float32)
    return jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))


def _race(
    keys: Key[Array, " B"],
    step: Length | None,
    weights: Float[Array, "B blocks size"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Draws a block and an index in it, each with probability proportional to its weight."""
    _, blocks, size = weights.shape
    times = _times(keys, step, blocks + size)
    block = jnp.argmin(times[:, :blocks] / jnp.sum(weights, axis=-1), axis=-1)
    within_block = jnp.take_along_axis(weights, block[:, None, None], 1, mode="clip")[:, 0]
    return block, jnp.argmin(times[:, blocks:] / within_block, axis=-1)


def _times(keys: Key[Array, " B"], step: Length | None, count: int) -> Float[Array, "B count"]:
    """Random times of a race, for blocks and for the entries of a block."""
    return _exponential(random_bits(keys, step, count))


def _exponential(bits: UInt32[Array, "B n"]) -> Float[Array, "B n"]:
    """Standard exponential numbers, positive, finite, and fine-grained near 0 (from 2**-33).

    Small ones win the race, so the uniform numbers that they come from use all 32 bits;
    ``jax.random.exponential`` uses 23.
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
