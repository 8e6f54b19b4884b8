"""Processors that forbid repeated n-grams; n is traced, so changing it does not recompile."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxllm.generation.inputs.values import int_leaf
from jaxllm.generation.processors.base import (
    EncoderTokens,
    History,
    LogitsProcessor,
    Scores,
    align_left,
    logits_processor,
    store,
    token_set,
)


@logits_processor()
class NoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Forbids tokens that would complete an n-gram of the sequence so far, prompt included.

    ``ngram_size`` 1 forbids every token of the sequence; 0 is off. Padding has no effect (in
    transformers padding counts as a token).

    >>> import jax.numpy as jnp
    >>> forbid = NoRepeatNGramLogitsProcessor(2)
    >>> forbid(jnp.array([[0, 1, 2, 0]]), jnp.zeros((1, 3)), 4).tolist()
    [[0.0, -inf, 0.0]]
    """

    ngram_size: Int[Array, ""]

    def __init__(self, ngram_size: int | Array) -> None:
        store(self, ngram_size=int_leaf(type(self).__name__, "ngram_size", ngram_size))

    def is_neutral(self) -> Bool[Array, ""]:
        return self.ngram_size == 0

    def process(self, history: History, scores: Scores) -> Scores:
        last = _completing(history, history.tokens, history.size, self.ngram_size)
        return jnp.where(token_set(history.tokens, last, scores.shape[1]), -jnp.inf, scores)


@logits_processor()
class EncoderNoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Forbids tokens that would complete an n-gram of the encoder's input (or of the prompt).

    ``encoder_mask`` is True at the real tokens of ``encoder_input_ids``; padding is ignored
    (transformers counts it as tokens). ``encoder_ngram_size`` 0 is off.
    """

    ngram_size: Int[Array, ""]
    encoder: EncoderTokens

    def __init__(
        self,
        encoder_ngram_size: int | Array,
        encoder_input_ids: Int[Array, "B S"],
        encoder_mask: Bool[Array, "B S"] | None = None,
    ) -> None:
        owner = type(self).__name__
        size = int_leaf(owner, "encoder_ngram_size", encoder_ngram_size)
        encoder = EncoderTokens.of(owner, encoder_input_ids, encoder_mask)
        store(self, ngram_size=size, encoder=encoder)

    def process(self, history: History, scores: Scores) -> Scores:
        tokens, size = align_left(*self.encoder.rows(scores.shape[0]))
        last = _completing(history, tokens, size, self.ngram_size)
        return jnp.where(token_set(tokens, last, scores.shape[1]), -jnp.inf, scores)


def _completing(
    history: History, tokens: Int[Array, "B S"], size: Int[Array, "#B 1"], n: Int[Array, ""]
) -> Bool[Array, "B S"]:
    """Mask of the columns of ``tokens`` that end an n-gram starting with the newest n-1 tokens.

    Makes one pass over ``tokens`` for each of the n-1 tokens to match.
    """
    columns = jnp.arange(tokens.shape[1])

    def agree(steps: Int[Array, ""], match: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        newest, exists = history.back(steps)
        before = jnp.roll(tokens, steps, axis=1)
        return match & exists & (columns >= steps) & (before == newest)

    everywhere = jnp.broadcast_to((columns < size) & (n > 0), tokens.shape)
    longest = jnp.minimum(n, tokens.shape[1] + 1)  # no longer n-gram fits
    return lax.fori_loop(1, longest, agree, everywhere)
