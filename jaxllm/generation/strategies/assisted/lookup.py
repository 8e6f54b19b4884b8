"""Prompt lookup: the draft is what followed the last tokens when they occurred before.

After https://github.com/apoorvumang/prompt-lookup-decoding, as in transformers 5.23
(`PromptLookupCandidateGenerator`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxllm.generation.strategies.assisted.acceptance import Drafted


def earlier_match(
    text: Int[Array, "B L"],
    size: Int[Array, "B 1"],
    allowed: Bool[Array, "B V"],
    longest: Int[Array, ""],
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Where each row's last n-gram occurred before, for the largest n up to `longest`.

    Of several places it is the first whose next token is allowed.

    Args:
        text: tokens of each row from its left on.
        size: how many they are.

    Returns:
        The column after the place, and whether there is one.

    >>> import jax.numpy as jnp
    >>> text, allowed = jnp.array([[5, 1, 2, 6, 1, 2, 7, 1, 2]]), jnp.ones((1, 8), bool)
    >>> [x.tolist() for x in earlier_match(text, jnp.array([[9]]), allowed, jnp.int32(2))]
    [[3], [True]]
    """
    columns = jnp.arange(text.shape[1], dtype=jnp.int32)

    def one_longer(k, carry):
        agrees, length = carry
        wanted = jnp.take_along_axis(text, jnp.maximum(size - 1 - k, 0), axis=1)
        agrees &= (columns >= k) & (jnp.roll(text, k, axis=1) == wanted)
        return agrees, length + agrees

    # The n-gram ends in column j, and something follows it.
    start = columns < size - 1
    _, length = lax.fori_loop(
        0, jnp.minimum(longest, text.shape[1]), one_longer, (start, jnp.zeros_like(text))
    )
    follower = jnp.clip(jnp.roll(text, -1, axis=1), 0, allowed.shape[1] - 1)
    length = jnp.where(jnp.take_along_axis(allowed, follower, axis=1), length, 0)
    best = jnp.max(length, axis=1, keepdims=True)
    first = jnp.argmax(length == best, axis=1).astype(jnp.int32)
    return first + 1, best[:, 0] > 0


def following(
    text: Int[Array, "B L"],
    size: Int[Array, "B 1"],
    at: Int[Array, " B"],
    limit: Int[Array, " B"],
    eos: Int[Array, " E"],
    most: int,
) -> Drafted:
    """Up to `limit` tokens of each row from column `at` on, but none from an end token on."""
    columns = at[:, None] + jnp.arange(most, dtype=jnp.int32)
    tokens = jnp.take_along_axis(text, jnp.minimum(columns, text.shape[1] - 1), axis=1)
    good = (columns < size) & ~jnp.isin(tokens, eos)
    before_end = jnp.sum(jnp.cumprod(good, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return Drafted(tokens, jnp.minimum(before_end, limit))
