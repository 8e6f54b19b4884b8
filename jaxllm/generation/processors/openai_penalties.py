"""Presence and frequency penalties and the logit bias of OpenAI's API.

``presence_penalty`` lowers the score of every token that was generated before, once;
``frequency_penalty`` once for each occurrence. The prompt does not count, unlike in
``repetition_penalty``. ``logit_bias`` adds a number to the scores of single tokens. Rows of one
batch program may have different values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.generation.inputs.values import Number, float_leaf, int_leaf
from jaxllm.generation.processors.base import (
    CurLen,
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    prompt_length,
    store,
)
from jaxllm.generation.settings.field_checks import MAX_BIASED_TOKENS


class _NewTokenPenalty(LogitsProcessor):
    """Base class of penalties on tokens that were generated before; the prompt does not count."""

    penalty: Float[Array, ""]
    prompt_len: Int[Array, ""] | None

    def __init__(self, penalty: Number, prompt_len: int | Array | None = None) -> None:
        owner = type(self).__name__
        length = None if prompt_len is None else int_leaf(owner, "prompt_len", prompt_len)
        leaf = float_leaf(owner, "penalty", penalty, "(-inf, inf)")
        store(self, penalty=leaf, prompt_len=length)

    def is_neutral(self) -> Bool[Array, ""]:
        return self.penalty == 0

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: Int[Array, ""] | int | None = None,
        **_: Any,
    ) -> Scores:
        """float32 ``[B, V]``; new tokens begin at column ``prompt_len``."""
        scores = jnp.asarray(scores, jnp.float32)
        first = jnp.asarray(prompt_length(self, prompt_len))
        history = History.of(input_ids, cur_len, mask)
        is_new = history.real & (jnp.arange(history.ids.shape[1]) >= first)
        return scores - self.penalty * self.weight(
            _token_counts(history.ids, is_new, scores.shape[1])
        )

    def weight(self, counts: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Factor of the penalty, from the number of times that each token was generated."""
        raise NotImplementedError


@logits_processor()
class PresencePenaltyLogitsProcessor(_NewTokenPenalty):
    """Subtracts ``penalty`` from the scores of tokens that were generated before.

    >>> penalise = PresencePenaltyLogitsProcessor(0.5, prompt_len=1)
    >>> penalise(jnp.array([[0, 2, 2, 1]]), jnp.zeros((1, 3)), 4).tolist()
    [[0.0, -0.5, -0.5]]
    """

    penalty: Float[Array, ""]
    prompt_len: Int[Array, ""] | None

    def weight(self, counts: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return (counts > 0).astype(jnp.float32)


@logits_processor()
class FrequencyPenaltyLogitsProcessor(_NewTokenPenalty):
    """Subtracts ``penalty`` once for each time that a token was generated before.

    >>> penalise = FrequencyPenaltyLogitsProcessor(0.5, prompt_len=1)
    >>> penalise(jnp.array([[0, 2, 2, 1]]), jnp.zeros((1, 3)), 4).tolist()
    [[0.0, -0.5, -1.0]]
    """

    penalty: Float[Array, ""]
    prompt_len: Int[Array, ""] | None

    def weight(self, counts: Float[Array, "B V"]) -> Float[Array, "B V"]:
        return counts


def _token_counts(
    ids: Int[Array, "B L"], counted: Bool[Array, "B L"], vocab_size: int
) -> Float[Array, "B V"]:
    rows = jnp.arange(ids.shape[0])[:, None]
    counts = jnp.zeros((ids.shape[0], vocab_size), jnp.float32)
    return counts.at[rows, jnp.where(counted, ids, vocab_size)].add(1.0, mode="drop")


@logits_processor()
class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the scores of single tokens, at most `MAX_BIASED_TOKENS`.

    The table has that size always, so that rows with different tokens share a program.

    >>> bias = LogitBiasLogitsProcessor({2: 1.5})
    >>> bias(jnp.array([[0]]), jnp.zeros((1, 3)), 1).tolist()
    [[0.0, 0.0, 1.5]]
    """

    tokens: Int[Array, " N"]
    bias: Float[Array, " N"]

    def __init__(self, logit_bias: Mapping[int, float]) -> None:
        tokens = np.zeros(MAX_BIASED_TOKENS, np.int32)
        bias = np.zeros(MAX_BIASED_TOKENS, np.float32)
        tokens[: len(logit_bias)], bias[: len(logit_bias)] = (
            list(logit_bias.keys()),
            list(logit_bias.values()),
        )
        store(self, tokens=tokens, bias=bias)

    def is_neutral(self) -> Bool[Array, ""]:
        return jnp.all(self.bias == 0)

    def process(self, history: History, scores: Scores) -> Scores:
        return scores.at[:, self.tokens].add(self.bias, mode="drop")
