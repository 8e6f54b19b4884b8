"""Processors that force or suppress tokens, replace NaN and infinities, or renormalise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.generation.inputs.values import TokenIds, id_table, int_leaf
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    ScoresProcessor,
    forbid,
    force,
    logits_processor,
    store,
)


@logits_processor()
class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Makes ``bos_token_id`` the only choice while the row holds a single token.

    >>> import jax.numpy as jnp
    >>> force = ForcedBOSTokenLogitsProcessor(2)
    >>> force(jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 3)), 1).tolist()
    [[-inf, -inf, 0.0]]
    """

    bos_token_id: Int[Array, " E"]

    def __init__(self, bos_token_id: int | Array) -> None:
        store(self, bos_token_id=id_table(type(self).__name__, "bos_token_id", bos_token_id))

    def process(self, history: History, scores: Scores) -> Scores:
        return force(scores, self.bos_token_id, history.length == 1)


@logits_processor()
class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Makes ``eos_token_id`` (one or several) the only choice at position ``max_length - 1``."""

    max_length: Int[Array, " ..."]
    eos_token_id: Int[Array, " E"]

    def __init__(self, max_length: int | Array, eos_token_id: TokenIds) -> None:
        owner = type(self).__name__
        store(
            self,
            max_length=int_leaf(owner, "max_length", max_length),
            eos_token_id=id_table(owner, "eos_token_id", eos_token_id),
        )

    def process(self, history: History, scores: Scores) -> Scores:
        is_last = history.length == jnp.reshape(self.max_length, (-1, 1)) - 1
        return force(scores, self.eos_token_id, is_last)


@logits_processor()
class SuppressTokensLogitsProcessor(ScoresProcessor):
    """Forbids the given tokens."""

    suppress_tokens: Int[Array, " E"]

    def __init__(self, suppress_tokens: TokenIds) -> None:
        table = id_table(type(self).__name__, "suppress_tokens", suppress_tokens)
        store(self, suppress_tokens=table)

    def process(self, history: History, scores: Scores) -> Scores:
        return forbid(scores, self.suppress_tokens)


@logits_processor()
class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """Forbids the given tokens at length ``begin_index`` only: as the first new token."""

    begin_suppress_tokens: Int[Array, " E"]
    begin_index: Int[Array, " ..."]

    def __init__(self, begin_suppress_tokens: TokenIds, begin_index: int | Array) -> None:
        owner = type(self).__name__
        store(
            self,
            begin_suppress_tokens=id_table(owner, "begin_suppress_tokens", begin_suppress_tokens),
            begin_index=int_leaf(owner, "begin_index", begin_index),
        )

    def process(self, history: History, scores: Scores) -> Scores:
        at_begin = history.length == jnp.reshape(self.begin_index, (-1, 1))
        return forbid(scores, self.begin_suppress_tokens, at_begin)


@logits_processor()
class InfNanRemoveLogitsProcessor(ScoresProcessor):
    """Replaces NaN by 0 and infinities by the largest finite numbers of their sign."""

    def __init__(self) -> None:
        store(self)

    def process(self, history: History, scores: Scores) -> Scores:
        return jnp.nan_to_num(scores, nan=0.0)


@logits_processor()
class LogitNormalization(ScoresProcessor):
    """Normalises the scores to log-probabilities (log-softmax)."""

    def __init__(self) -> None:
        store(self)

    def process(self, history: History, scores: Scores) -> Scores:
        return jax.nn.log_softmax(scores, axis=-1)
