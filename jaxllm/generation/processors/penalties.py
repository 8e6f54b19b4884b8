"""Penalties on tokens that occur in the sequence, encoder input or earlier beam groups, and n-grams
that may not occur again.

``presence_penalty`` and ``frequency_penalty`` are those of OpenAI's API: the prompt does not count,
unlike in ``repetition_penalty``.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import Number, float_leaf, int_rows
from jaxllm.generation.processors.base import (
    CurLen,
    History,
    LogitsProcessor,
    Scores,
    align_left,
    for_sequences,
    logits_processor,
    prompt_length,
    store,
    token_set,
)


class EncoderTokens(NamedTuple):
    """The encoder's input ids (or the prompt's) ``[R, S]``, and their padding mask."""

    ids: Int[Array, "R S"]
    real: Bool[Array, "R S"]

    @classmethod
    def of(cls, owner: str, ids: Int[Array, "B S"], mask: Bool[Array, "B S"] | None) -> Self:
        """Checks ids and mask; a single row may lack its batch axis. None: ids >= 0 are real.

        Raises:
            InputError: the ids are not ``[B, S]``, or the mask has another shape.
        """
        ids = jnp.atleast_2d(jnp.asarray(ids, jnp.int32))
        real = ids >= 0 if mask is None else jnp.atleast_2d(jnp.asarray(mask, bool))
        if ids.ndim != 2 or real.shape != ids.shape:
            raise InputError(
                f"{owner}: `encoder_input_ids` must be [batch, length] and its mask alike, "
                f"but they are {ids.shape} and {real.shape}"
            )
        return cls(ids, real)

    def rows(self, count: int) -> tuple[Int[Array, "rows S"], Bool[Array, "rows S"]]:
        """Ids and mask for ``count`` rows, each input repeated for its beams."""
        batch = self.ids.shape[0]
        if count % batch:
            raise InputError(f"{count} rows of scores do not divide among {batch} encoder inputs")
        return for_sequences((self.ids, self.real), count)


def _penalized(scores: Scores, tokens: Bool[Array, "#B V"], penalty: Float[Array, "#B"]) -> Scores:
    """Applies CTRL's penalty (Keskar et al. 2019): multiplies negative scores, divides others."""
    penalty = penalty[:, None]
    return jnp.where(tokens, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


@logits_processor(rows=True)
class RepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Penalises every token of the sequence so far, prompt included, once each.

    Padding never counts. (transformers 5.23 ignores columns before the first real token; earlier
    versions penalized the padding token of left-padded rows.) The first ``prompt_ignore_length``
    columns, one number or one per row, do not count either.

    >>> import jax.numpy as jnp
    >>> penalise = RepetitionPenaltyLogitsProcessor(2.0)
    >>> penalise(jnp.array([[0, 2, 1]]), jnp.array([[3.0, 3.0, -3.0]]), 2).tolist()
    [[1.5, 3.0, -6.0]]
    """

    penalty: Float[Array, " R"]
    prompt_ignore_length: Int[Array, " R"] | None

    def __init__(
        self, penalty: Number, prompt_ignore_length: int | Int[Array, " B"] | None = None
    ) -> None:
        owner = type(self).__name__
        ignored = prompt_ignore_length
        if ignored is not None:
            ignored = int_rows(owner, "prompt_ignore_length", ignored)
        leaf = float_leaf(owner, "penalty", penalty, "(0, inf)")[None]
        store(self, penalty=leaf, prompt_ignore_length=ignored)

    def is_neutral(self) -> Bool[Array, " R"]:
        return self.penalty == 1

    def process(self, history: History, scores: Scores) -> Scores:
        counted = history.real
        if self.prompt_ignore_length is not None:
            counted &= jnp.arange(counted.shape[1])[None] >= self.prompt_ignore_length[:, None]
        return _penalized(scores, token_set(history.ids, counted, scores.shape[1]), self.penalty)


@logits_processor(rows=True)
class EncoderRepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Favours the tokens of the encoder's input (of the prompt, for decoder-only models).

    Applies the repetition penalty with ``1 / penalty``. ``encoder_mask`` is True at real tokens;
    padding does not count (in transformers it does).
    """

    penalty: Float[Array, " R"]
    encoder: EncoderTokens

    def __init__(
        self,
        penalty: Number,
        encoder_input_ids: Int[Array, "B S"],
        encoder_mask: Bool[Array, "B S"] | None = None,
    ) -> None:
        owner = type(self).__name__
        leaf = float_leaf(owner, "penalty", penalty, "(0, inf)")[None]
        encoder = EncoderTokens.of(owner, encoder_input_ids, encoder_mask)
        store(self, penalty=leaf, encoder=encoder)

    def process(self, history: History, scores: Scores) -> Scores:
        ids, real = self.encoder.rows(scores.shape[0])
        return _penalized(scores, token_set(ids, real, scores.shape[1]), 1 / self.penalty)


@logits_processor(static=("num_beams", "num_beam_groups"), rows=True)
class HammingDiversityLogitsProcessor(LogitsProcessor):
    """Lowers the scores of tokens that earlier beam groups of the same prompt chose in this step.

    Diverse beam search (Vijayakumar et al. 2018), as in transformers 4.56:
    ``scores -= diversity_penalty * times chosen``.
    """

    diversity_penalty: Float[Array, " R"]
    num_beams: int
    num_beam_groups: int

    def __init__(self, diversity_penalty: Number, num_beams: int, num_beam_groups: int) -> None:
        owner = type(self).__name__
        for name, value in [("num_beams", num_beams), ("num_beam_groups", num_beam_groups)]:
            if not is_integer(value) or value < 2:
                raise InputError(
                    f"{owner}: `{name}` must be an integer above 1, but is {quoted(value)}"
                )
        if num_beam_groups > num_beams:
            raise InputError(
                f"{owner}: `num_beam_groups` ({num_beam_groups}) must be at most `num_beams` "
                f"({num_beams})"
            )
        leaf = float_leaf(owner, "diversity_penalty", diversity_penalty, "[0, inf)")[None]
        store(self, diversity_penalty=leaf, num_beams=num_beams, num_beam_groups=num_beam_groups)

    def __call__(
        self,
        input_ids: Int[Array, "rows L"],
        scores: Float[Array, "rows V"],
        cur_len: CurLen = None,
        *,
        current_tokens: Int[Array, " all_beams"],
        beam_group_idx: Int[Array, ""] | int,
        **_: object,
    ) -> Float[Array, "rows V"]:
        """Processes the scores of one beam group.

        Args:
            input_ids: unused.
            scores: ``[prompts * group size, V]``.
            cur_len: unused.
            current_tokens: ``[prompts * num_beams]``, the tokens chosen in this step so far.
            beam_group_idx: index of the group.
        """
        scores = jnp.asarray(scores, jnp.float32)
        tokens = jnp.asarray(current_tokens, jnp.int32).reshape(-1, self.num_beams)
        earlier = jnp.arange(self.num_beams) < beam_group_idx * (
            self.num_beams // self.num_beam_groups
        )
        items = jnp.arange(tokens.shape[0])[:, None]
        counts = jnp.zeros((tokens.shape[0], scores.shape[1]), jnp.float32)
        counts = counts.at[items, tokens].add(earlier.astype(jnp.float32), mode="drop")
        group_size = scores.shape[0] // tokens.shape[0]
        return scores - self.diversity_penalty[:, None] * jnp.repeat(counts, group_size, axis=0)


@logits_processor(rows=True)
class FrequencyPenaltyLogitsProcessor(LogitsProcessor):
    """Subtracts ``penalty`` once for each time that a token was generated before.

    >>> penalise = FrequencyPenaltyLogitsProcessor(0.5, prompt_len=1)
    >>> penalise(jnp.array([[0, 2, 2, 1]]), jnp.zeros((1, 3)), 4).tolist()
    [[0.0, -0.5, -1.0]]
    """

    penalty: Float[Array, " R"]
    prompt_len: Int[Array, " R"] | None

    def __init__(self, penalty: Number, prompt_len: int | Array | None = None) -> None:
        owner = type(self).__name__
        length = None if prompt_len is None else int_rows(owner, "prompt_len", prompt_len)
        leaf = float_leaf(owner, "penalty", penalty, "(-inf, inf)")[None]
        store(self, penalty=leaf, prompt_len=length)

    def is_neutral(self) -> Bool[Array, " R"]:
        return self.penalty == 0

    def process(self, history: History, scores: Scores) -> Scores:
        rows, vocab_size = jnp.arange(history.ids.shape[0])[:, None], scores.shape[1]
        columns = jnp.arange(history.ids.shape[1])[None]
        is_new = history.real & (columns >= prompt_length(self, history))
        new_ids = jnp.where(is_new, history.ids, vocab_size)
        counts = jnp.zeros_like(scores).at[rows, new_ids].add(1.0, mode="drop")
        return scores - self.penalty[:, None] * self.weight(counts)

    def weight(self, counts: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Factor of the penalty, from the number of times that each token was generated."""
        return counts


@logits_processor(rows=True)
class PresencePenaltyLogitsProcessor(FrequencyPenaltyLogitsProcessor):
    """Subtracts ``penalty`` from the scores of tokens that were generated before.

    >>> penalise = PresencePenaltyLogitsProcessor(0.5, prompt_len=1)
    >>> penalise(jnp.array([[0, 2, 2, 1]]), jnp.zeros((1, 3)), 4).tolist()
    [[0.0, -0.5, -0.5]]
    """

    def weight(self, counts: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return (counts > 0).astype(jnp.float32)


@logits_processor(rows=True)
class NoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Forbids tokens that would complete an n-gram of the sequence so far, prompt included.

    ``ngram_size`` 1 forbids every token of the sequence; 0 is off. Padding has no effect (in
    transformers padding counts as a token).

    >>> import jax.numpy as jnp
    >>> forbid = NoRepeatNGramLogitsProcessor(2)
    >>> forbid(jnp.array([[0, 1, 2, 0]]), jnp.zeros((1, 3)), 4).tolist()
    [[0.0, -inf, 0.0]]
    """

    ngram_size: Int[Array, " R"]

    def __init__(self, ngram_size: int | Array) -> None:
        store(self, ngram_size=int_rows(type(self).__name__, "ngram_size", ngram_size))

    def is_neutral(self) -> Bool[Array, " R"]:
        return self.ngram_size == 0

    def process(self, history: History, scores: Scores) -> Scores:
        last = _completing(history, history.tokens, history.size, self.ngram_size)
        return jnp.where(token_set(history.tokens, last, scores.shape[1]), -jnp.inf, scores)


@logits_processor(rows=True)
class EncoderNoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Forbids tokens that would complete an n-gram of the encoder's input (or of the prompt).

    ``encoder_mask`` is True at the real tokens of ``encoder_input_ids``; padding is ignored
    (transformers counts it as tokens). ``encoder_ngram_size`` 0 is off.
    """

    ngram_size: Int[Array, " R"]
    encoder: EncoderTokens

    def __init__(
        self,
        encoder_ngram_size: int | Array,
        encoder_input_ids: Int[Array, "B S"],
        encoder_mask: Bool[Array, "B S"] | None = None,
    ) -> None:
        owner = type(self).__name__
        size = int_rows(owner, "encoder_ngram_size", encoder_ngram_size)
        encoder = EncoderTokens.of(owner, encoder_input_ids, encoder_mask)
        store(self, ngram_size=size, encoder=encoder)

    def process(self, history: History, scores: Scores) -> Scores:
        tokens, size = align_left(*self.encoder.rows(scores.shape[0]))
        last = _completing(history, tokens, size, self.ngram_size)
        return jnp.where(token_set(tokens, last, scores.shape[1]), -jnp.inf, scores)


def _completing(
    history: History, tokens: Int[Array, "B S"], size: Int[Array, "#B 1"], n: Int[Array, "#B"]
) -> Bool[Array, "B S"]:
    """Mask of the columns of ``tokens`` that end an n-gram starting with the newest n-1 tokens.

    Makes one pass over ``tokens`` for each of the n-1 tokens to match, of the largest n.
    """
    columns, n = jnp.arange(tokens.shape[1])[None], n[:, None]

    def agree(steps: Int[Array, ""], match: Bool[Array, "B S"]) -> Bool[Array, "B S"]:
        newest, exists = history.back(steps)
        before = jnp.roll(tokens, steps, axis=1)
        return match & ((steps >= n) | (exists & (columns >= steps) & (before == newest)))

    everywhere = jnp.broadcast_to((columns < size) & (n > 0), tokens.shape)
    longest = jnp.minimum(jnp.max(n), tokens.shape[1] + 1)  # no longer n-gram fits
    return lax.fori_loop(1, longest, agree, everywhere)
