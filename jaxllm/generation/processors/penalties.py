"""Penalties on tokens that occur in the sequence, encoder input or earlier beam groups."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import Number, float_leaf, int_leaf, is_integer
from jaxllm.generation.processors.base import (
    CurLen,
    EncoderTokens,
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    store,
    token_set,
)


def _penalized(scores: Scores, tokens: Bool[Array, "B V"], penalty: Float[Array, ""]) -> Scores:
    """Applies CTRL's penalty (Keskar et al. 2019): multiplies negative scores, divides others."""
    return jnp.where(tokens, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)


@logits_processor()
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

    penalty: Float[Array, ""]
    prompt_ignore_length: Int[Array, " ..."] | None

    def __init__(
        self, penalty: Number, prompt_ignore_length: int | Int[Array, " B"] | None = None
    ) -> None:
        owner = type(self).__name__
        ignored = prompt_ignore_length
        if ignored is not None:
            ignored = int_leaf(owner, "prompt_ignore_length", ignored)
        leaf = float_leaf(owner, "penalty", penalty, "(0, inf)")
        store(self, penalty=leaf, prompt_ignore_length=ignored)

    def is_neutral(self) -> Bool[Array, ""]:
        return self.penalty == 1

    def process(self, history: History, scores: Scores) -> Scores:
        counted = history.real
        if self.prompt_ignore_length is not None:
            first = jnp.reshape(self.prompt_ignore_length, (-1, 1))
            counted &= jnp.arange(counted.shape[1]) >= first
        return _penalized(scores, token_set(history.ids, counted, scores.shape[1]), self.penalty)


@logits_processor()
class EncoderRepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Favours the tokens of the encoder's input (of the prompt, for decoder-only models).

    Applies the repetition penalty with ``1 / penalty``. ``encoder_mask`` is True at real tokens;
    padding does not count (in transformers it does).
    """

    penalty: Float[Array, ""]
    encoder: EncoderTokens

    def __init__(
        self,
        penalty: Number,
        encoder_input_ids: Int[Array, "B S"],
        encoder_mask: Bool[Array, "B S"] | None = None,
    ) -> None:
        owner = type(self).__name__
        leaf = float_leaf(owner, "penalty", penalty, "(0, inf)")
        encoder = EncoderTokens.of(owner, encoder_input_ids, encoder_mask)
        store(self, penalty=leaf, encoder=encoder)

    def process(self, history: History, scores: Scores) -> Scores:
        ids, real = self.encoder.rows(scores.shape[0])
        return _penalized(scores, token_set(ids, real, scores.shape[1]), 1 / self.penalty)


@logits_processor(static=("num_beams", "num_beam_groups"))
class HammingDiversityLogitsProcessor(LogitsProcessor):
    """Lowers the scores of tokens that earlier beam groups of the same prompt chose in this step.

    Diverse beam search (Vijayakumar et al. 2018), as in transformers 4.56:
    ``scores -= diversity_penalty * times chosen``.
    """

    diversity_penalty: Float[Array, ""]
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
        leaf = float_leaf(owner, "diversity_penalty", diversity_penalty, "[0, inf)")
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
        return scores - self.diversity_penalty * jnp.repeat(counts, group_size, axis=0)
