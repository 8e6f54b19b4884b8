"""Prompt lookup: drafts the tokens that followed an earlier occurrence of a row's last n-gram.

After https://github.com/apoorvumang/prompt-lookup-decoding, as in transformers 5.23
(`PromptLookupCandidateGenerator`).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.processors.base import History
from jaxllm.generation.processors.warpers import (
    Filter,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from jaxllm.generation.strategies.assisted.acceptance import DraftTokens
from jaxllm.generation.strategies.assisted.drafts import Draft, DraftInputs, Proposal
from jaxllm.generation.strategies.strategy import is_eos

SCORE_DEPENDENT = (Filter, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""Processors that depend on the scores, which a lookup does not have."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup(Draft):
    """Draft of the tokens after an earlier occurrence of a row's last n-gram."""

    has_scores: ClassVar[bool] = False
    ngram_size: Int[Array, ""]
    """The longest n-gram to look for."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        buffer = inputs.buffer
        history = History.of(buffer.sequences, buffer.cur_len, buffer.mask)
        # Rules forbid tokens independently of the scores.
        rules = LogitsProcessorList(
            p for p in inputs.settings.processors if not isinstance(p, SCORE_DEPENDENT)
        )
        vocabulary = inputs.model.config.vocab_size
        scores = rules(
            buffer.sequences,
            jnp.ones((buffer.sequences.shape[0], vocabulary), jnp.float32),
            buffer.cur_len,
            mask=buffer.mask,
            prompt_len=inputs.prompt_len,
        )
        allowed = scores > jnp.finfo(jnp.float32).min
        column, has_match = earlier_match(history.tokens, history.size, allowed, self.ngram_size)
        limit = jnp.where(has_match, inputs.limit, 0)
        drafted = draft_from(
            history.tokens, history.size, column, limit, inputs.settings.eos, inputs.max_draft
        )
        real = jnp.arange(inputs.max_draft) < drafted.size[:, None]
        buffer = buffer.put(drafted.tokens, real)
        return Proposal(drafted, buffer, inputs.cache, inputs.draft_state)


def earlier_match(
    tokens: Int[Array, "B L"],
    size: Int[Array, "B 1"],
    allowed: Bool[Array, "B V"],
    longest: Int[Array, ""],
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """First earlier occurrence of each row's last n-gram that an allowed token follows, for the
    largest n up to `longest`.

    Args:
        tokens: tokens of each row, left-aligned.
        size: number of tokens of each row.

    Returns:
        The column after the n-gram, and whether there is one.

    >>> import jax.numpy as jnp
    >>> tokens, allowed = jnp.array([[5, 1, 2, 6, 1, 2, 7, 1, 2]]), jnp.ones((1, 8), bool)
    >>> [x.tolist() for x in earlier_match(tokens, jnp.array([[9]]), allowed, jnp.int32(2))]
    [[3], [True]]
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)

    def one_longer(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        agrees, length = carry
        last = jnp.take_along_axis(tokens, jnp.maximum(size - 1 - k, 0), axis=1)
        agrees &= (columns >= k) & (jnp.roll(tokens, k, axis=1) == last)
        return agrees, length + agrees

    # Columns in which the n-gram may end: another token follows.
    start = columns < size - 1
    _, length = lax.fori_loop(
        0, jnp.minimum(longest, tokens.shape[1]), one_longer, (start, jnp.zeros_like(tokens))
    )
    follower = jnp.clip(jnp.roll(tokens, -1, axis=1), 0, allowed.shape[1] - 1)
    length = jnp.where(jnp.take_along_axis(allowed, follower, axis=1), length, 0)
    best = jnp.max(length, axis=1, keepdims=True)
    match = jnp.argmax(length == best, axis=1).astype(jnp.int32)
    return match + 1, best[:, 0] > 0


def draft_from(
    tokens: Int[Array, "B L"],
    size: Int[Array, "B 1"],
    column: Int[Array, " B"],
    limit: Int[Array, " B"],
    eos: Int[Array, " E"],
    max_draft: int,
) -> DraftTokens:
    """Drafts up to `limit` tokens of each row from `column` on, and stops before an end token."""
    columns = column[:, None] + jnp.arange(max_draft, dtype=jnp.int32)
    drafted = jnp.take_along_axis(tokens, jnp.minimum(columns, tokens.shape[1] - 1), axis=1)
    continues = (columns < size) & ~is_eos(drafted, eos)
    before_end = jnp.sum(jnp.cumprod(continues, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return DraftTokens(drafted, jnp.minimum(before_end, limit))
