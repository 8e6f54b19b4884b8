"""Length processors: minimum length, and a growing preference for end-of-sequence tokens.

Lengths count as in transformers: the whole row, prompt and padding included (for T5 the decoder's
row, which starts with one token). See ``length`` in :class:`LogitsProcessor`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import TokenIds, float_leaf, id_table, int_leaf
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    forbid,
    id_mask,
    logits_processor,
    store,
)

_HUGE = 1e30


@logits_processor()
class MinLengthLogitsProcessor(LogitsProcessor):
    """Forbids every end-of-sequence token below ``min_length`` tokens, prompt included.

    >>> import jax.numpy as jnp
    >>> wait = MinLengthLogitsProcessor(3, eos_token_id=1)
    >>> ids, scores = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 2))
    >>> wait(ids, scores, 2).tolist(), wait(ids, scores, 3).tolist()
    ([[0.0, -inf]], [[0.0, 0.0]])
    """

    min_length: Int[Array, " ..."]
    eos_token_id: Int[Array, " E"]

    def __init__(self, min_length: int | Array, eos_token_id: TokenIds) -> None:
        owner = type(self).__name__
        store(
            self,
            min_length=int_leaf(owner, "min_length", min_length),
            eos_token_id=id_table(owner, "eos_token_id", eos_token_id),
        )

    def process(self, history: History, scores: Scores) -> Scores:
        early = history.length < jnp.reshape(self.min_length, (-1, 1))
        return forbid(scores, self.eos_token_id, early)


@logits_processor()
class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """Forbids every end-of-sequence token until ``min_new_tokens`` tokens follow the prompt."""

    prompt_length_to_skip: Int[Array, " ..."]
    min_new_tokens: Int[Array, " ..."]
    eos_token_id: Int[Array, " E"]

    def __init__(
        self,
        prompt_length_to_skip: int | Array,
        min_new_tokens: int | Array,
        eos_token_id: TokenIds,
    ) -> None:
        owner = type(self).__name__
        store(
            self,
            prompt_length_to_skip=int_leaf(owner, "prompt_length_to_skip", prompt_length_to_skip),
            min_new_tokens=int_leaf(owner, "min_new_tokens", min_new_tokens),
            eos_token_id=id_table(owner, "eos_token_id", eos_token_id),
        )

    def is_neutral(self) -> Bool[Array, ""]:
        return self.min_new_tokens == 0

    def process(self, history: History, scores: Scores) -> Scores:
        new = history.length - jnp.reshape(self.prompt_length_to_skip, (-1, 1))
        early = new < jnp.reshape(self.min_new_tokens, (-1, 1))
        return forbid(scores, self.eos_token_id, early)


@logits_processor()
class ExponentialDecayLengthPenalty(LogitsProcessor):
    """Raises the end-of-sequence scores exponentially after ``start`` new tokens.

    After n > ``start`` new tokens, the score s of each end token grows by
    ``|s| (factor**(n - start) - 1)``; infinite scores are unchanged. Growth is bounded by 1e30;
    in transformers it can become infinite.
    """

    regulation_start: Int[Array, " ..."]
    regulation_factor: Float[Array, ""]
    eos_token_id: Int[Array, " E"]

    def __init__(
        self,
        exponential_decay_length_penalty: tuple[int, float],
        eos_token_id: TokenIds,
        input_ids_seq_length: int | Array,
    ) -> None:
        owner, name = type(self).__name__, "exponential_decay_length_penalty"
        try:
            start, factor = exponential_decay_length_penalty
        except (TypeError, ValueError):
            raise InputError(
                f"{owner}: `{name}` must be (start, factor), "
                f"but is {quoted(exponential_decay_length_penalty)}"
            ) from None
        prompt = int_leaf(owner, "input_ids_seq_length", input_ids_seq_length)
        store(
            self,
            regulation_start=int_leaf(owner, name, start) + prompt,
            regulation_factor=float_leaf(owner, name, factor, "(0, inf)"),
            eos_token_id=id_table(owner, "eos_token_id", eos_token_id),
        )

    def process(self, history: History, scores: Scores) -> Scores:
        excess = history.length - jnp.reshape(self.regulation_start, (-1, 1))
        growth = jnp.power(self.regulation_factor, excess.astype(jnp.float32)) - 1
        raised = scores + jnp.abs(scores) * jnp.minimum(growth, _HUGE)
        applies = (excess > 0) & id_mask(self.eos_token_id, scores.shape[1]) & jnp.isfinite(scores)
        return jnp.where(applies, jnp.minimum(raised, _HUGE), scores)
