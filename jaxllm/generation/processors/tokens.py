"""Processors that force, forbid or bias tokens by rule: fixed tokens and sequences, and rules about
the length.

Lengths count as in transformers: the whole row, prompt and padding included (for T5 the decoder's
row, which starts with one token). See ``length`` in :class:`History`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.generation.inputs.values import (
    MAX_BIASED_TOKENS,
    NO_TOKEN,
    TokenIds,
    biases,
    bucket,
    checked_by,
    decay,
    float_leaf,
    id_table,
    int_rows,
    token_biases,
    words,
)
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    ScoresProcessor,
    add_at,
    forbid,
    force,
    id_mask,
    logits_processor,
    store,
)

_HUGE = 1e30


@logits_processor(rows=True)
class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Makes ``bos_token_id`` the only choice while the row holds a single token.

    >>> import jax.numpy as jnp
    >>> force = ForcedBOSTokenLogitsProcessor(2)
    >>> force(jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 3)), 1).tolist()
    [[-inf, -inf, 0.0]]
    """

    bos_token_id: Int[Array, "R E"]

    def __init__(self, bos_token_id: int | Array) -> None:
        store(self, id_table, bos_token_id=bos_token_id)

    def process(self, history: History, scores: Scores) -> Scores:
        return force(scores, self.bos_token_id, history.length == 1)


@logits_processor(rows=True)
class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Makes ``eos_token_id`` (one or several) the only choice at position ``max_length - 1``."""

    max_length: Int[Array, " R"]
    eos_token_id: Int[Array, "R E"]

    def __init__(self, max_length: int | Array, eos_token_id: TokenIds) -> None:
        store(self, int_rows, max_length=max_length)
        store(self, id_table, eos_token_id=eos_token_id)

    def process(self, history: History, scores: Scores) -> Scores:
        is_last = history.length == self.max_length[:, None] - 1
        return force(scores, self.eos_token_id, is_last)


@logits_processor(rows=True)
class SuppressTokensLogitsProcessor(ScoresProcessor):
    """Forbids the given tokens."""

    suppress_tokens: Int[Array, "R E"]

    def __init__(self, suppress_tokens: TokenIds) -> None:
        store(self, id_table, suppress_tokens=suppress_tokens)

    def process(self, history: History, scores: Scores) -> Scores:
        return forbid(scores, self.suppress_tokens)


@logits_processor(rows=True)
class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """Forbids the given tokens at length ``begin_index`` only: as the first new token."""

    begin_suppress_tokens: Int[Array, "R E"]
    begin_index: Int[Array, " R"]

    def __init__(self, begin_suppress_tokens: TokenIds, begin_index: int | Array) -> None:
        store(self, id_table, begin_suppress_tokens=begin_suppress_tokens)
        store(self, int_rows, begin_index=begin_index)

    def process(self, history: History, scores: Scores) -> Scores:
        at_begin = history.length == self.begin_index[:, None]
        return forbid(scores, self.begin_suppress_tokens, at_begin)


@logits_processor(rows=True)
class InfNanRemoveLogitsProcessor(ScoresProcessor):
    """Replaces NaN by 0 and infinities by the largest finite numbers of their sign."""

    def __init__(self) -> None:
        store(self)

    def process(self, history: History, scores: Scores) -> Scores:
        return jnp.nan_to_num(scores, nan=0.0)


@logits_processor(rows=True)
class LogitNormalization(ScoresProcessor):
    """Normalises the scores to log-probabilities (log-softmax)."""

    def __init__(self) -> None:
        store(self)

    def process(self, history: History, scores: Scores) -> Scores:
        return jax.nn.log_softmax(scores, axis=-1)


@logits_processor(rows=True)
class SequenceBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the token that would complete a given sequence.

    ``sequence_bias`` maps tuples of token ids to numbers, or lists pairs ``[ids, bias]``. The bias
    of a single token always applies; that of a longer sequence applies to its last token when the
    row ends with all the tokens before it. Padding is ignored (transformers counts it as tokens).

    >>> import jax.numpy as jnp
    >>> bias = SequenceBiasLogitsProcessor({(2,): 1.0, (0, 1): 5.0})
    >>> bias(jnp.array([[1, 0]]), jnp.zeros((1, 3)), 2).tolist()
    [[0.0, 5.0, 1.0]]
    """

    words: Int[Array, "R N M"]
    bias: Float[Array, "R N"]

    def __init__(self, sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any]) -> None:
        owner = type(self).__name__
        pairs = checked_by(owner, "sequence_bias", biases, sequence_bias)
        table = word_table([word for word, _ in pairs])
        bias = np.zeros(table.shape[:2], np.float32)
        bias[0, : len(pairs)] = [value for _, value in pairs]
        store(self, words=table, bias=bias)

    def process(self, history: History, scores: Scores) -> Scores:
        return _biased(history, scores, self.words, self.bias)


@logits_processor(rows=True)
class NoBadWordsLogitsProcessor(LogitsProcessor):
    """Forbids the given token sequences, a list of lists of ids.

    A sequence of a single end-of-sequence token is ignored, as in transformers.
    """

    words: Int[Array, "R N M"]
    eos_token_id: Int[Array, "R E"]

    def __init__(
        self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: TokenIds | None = None
    ) -> None:
        lists = checked_by(type(self).__name__, "bad_words_ids", words, bad_words_ids)
        store(self, words=word_table(lists))
        store(self, id_table, eos_token_id=[] if eos_token_id is None else eos_token_id)

    def process(self, history: History, scores: Scores) -> Scores:
        single = jnp.all(self.words[..., :-1] == NO_TOKEN, axis=-1)
        is_eos = single & jnp.any(self.words[..., -1:] == self.eos_token_id[:, None], axis=-1)
        return _biased(history, scores, self.words, jnp.where(is_eos, 0.0, -jnp.inf))


@logits_processor(rows=True)
class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the scores of single tokens, at most `MAX_BIASED_TOKENS`.

    The table has that size always, so that rows with different tokens share a program.

    >>> bias = LogitBiasLogitsProcessor({2: 1.5})
    >>> bias(jnp.array([[0]]), jnp.zeros((1, 3)), 1).tolist()
    [[0.0, 0.0, 1.5]]
    """

    tokens: Int[Array, "R N"]
    bias: Float[Array, "R N"]

    def __init__(self, logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> None:
        pairs = checked_by(type(self).__name__, "logit_bias", token_biases, logit_bias)
        tokens = np.zeros((1, MAX_BIASED_TOKENS), np.int32)
        bias = np.zeros((1, MAX_BIASED_TOKENS), np.float32)
        tokens[0, : len(pairs)] = [token for token, _ in pairs]
        bias[0, : len(pairs)] = [value for _, value in pairs]
        store(self, tokens=tokens, bias=bias)

    def is_neutral(self) -> Bool[Array, " R"]:
        return jnp.all(self.bias == 0, axis=1)

    def process(self, history: History, scores: Scores) -> Scores:
        return add_at(scores, self.tokens, self.bias)


def word_table(words: Sequence[tuple[int, ...]]) -> Int[Array, "1 N M"]:
    """Packs sequences of ids into int32 rows, right-aligned and padded with ``NO_TOKEN``.

    N and M are padded to powers of two, so that adding a few sequences or tokens does not
    compile again.
    """
    shape = 1, bucket(len(words), 8), bucket(max(map(len, words)), 4)
    table = np.full(shape, NO_TOKEN, np.int32)
    for row, word in zip(table[0], words, strict=False):
        row[-len(word) :] = word
    return table  # pyright: ignore[reportReturnType]


def _biased(
    history: History, scores: Scores, words: Int[Array, "#B N M"], bias: Float[Array, "#B N"]
) -> Scores:
    prefix, last = words[..., :-1], words[..., -1]
    recent, exists = history.last(prefix.shape[2])
    agrees = exists[:, None] & (recent[:, None] == prefix)
    completes: Bool[Array, "B N"] = jnp.all(agrees | (prefix == NO_TOKEN), axis=-1)
    last = jnp.where(last == NO_TOKEN, scores.shape[1], last)
    return scores + add_at(jnp.zeros_like(scores), last, jnp.where(completes, bias, 0.0))


@logits_processor(rows=True)
class MinLengthLogitsProcessor(LogitsProcessor):
    """Forbids every end-of-sequence token below ``min_length`` tokens, prompt included.

    >>> import jax.numpy as jnp
    >>> wait = MinLengthLogitsProcessor(3, eos_token_id=1)
    >>> ids, scores = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 2))
    >>> wait(ids, scores, 2).tolist(), wait(ids, scores, 3).tolist()
    ([[0.0, -inf]], [[0.0, 0.0]])
    """

    min_length: Int[Array, " R"]
    eos_token_id: Int[Array, "R E"]

    def __init__(self, min_length: int | Array, eos_token_id: TokenIds) -> None:
        store(self, int_rows, min_length=min_length)
        store(self, id_table, eos_token_id=eos_token_id)

    def process(self, history: History, scores: Scores) -> Scores:
        early = history.length < self.min_length[:, None]
        return forbid(scores, self.eos_token_id, early)


@logits_processor(rows=True)
class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """Forbids every end-of-sequence token until ``min_new_tokens`` tokens follow the prompt."""

    prompt_length_to_skip: Int[Array, " R"]
    min_new_tokens: Int[Array, " R"]
    eos_token_id: Int[Array, "R E"]

    def __init__(
        self,
        prompt_length_to_skip: int | Array,
        min_new_tokens: int | Array,
        eos_token_id: TokenIds,
    ) -> None:
        lengths = {"prompt_length_to_skip": prompt_length_to_skip, "min_new_tokens": min_new_tokens}
        store(self, int_rows, **lengths)
        store(self, id_table, eos_token_id=eos_token_id)

    def is_neutral(self) -> Bool[Array, " R"]:
        return self.min_new_tokens == 0

    def process(self, history: History, scores: Scores) -> Scores:
        new = history.length - self.prompt_length_to_skip[:, None]
        early = new < self.min_new_tokens[:, None]
        return forbid(scores, self.eos_token_id, early)


@logits_processor(rows=True)
class ExponentialDecayLengthPenalty(LogitsProcessor):
    """Raises the end-of-sequence scores exponentially after ``start`` new tokens.

    After n > ``start`` new tokens, the score s of each end token grows by
    ``|s| (factor**(n - start) - 1)``; infinite scores are unchanged. Growth is bounded by 1e30;
    in transformers it can become infinite.
    """

    regulation_start: Int[Array, " R"]
    regulation_factor: Float[Array, " R"]
    eos_token_id: Int[Array, "R E"]

    def __init__(
        self,
        exponential_decay_length_penalty: tuple[int, float],
        eos_token_id: TokenIds,
        input_ids_seq_length: int | Array,
    ) -> None:
        owner, name = type(self).__name__, "exponential_decay_length_penalty"
        start, factor = checked_by(owner, name, decay, exponential_decay_length_penalty)
        prompt = int_rows(owner, "input_ids_seq_length", input_ids_seq_length)
        start = int_rows(owner, name, start) + prompt
        factor = float_leaf(owner, name, factor, "(0, inf)")[None]
        store(self, regulation_start=start, regulation_factor=factor)
        store(self, id_table, eos_token_id=eos_token_id)

    def process(self, history: History, scores: Scores) -> Scores:
        excess = history.length - self.regulation_start[:, None]
        growth = jnp.power(self.regulation_factor[:, None], excess.astype(jnp.float32)) - 1
        raised = scores + jnp.abs(scores) * jnp.minimum(growth, _HUGE)
        is_end = id_mask(self.eos_token_id, scores.shape[1])
        applies = (excess > 0) & is_end & jnp.isfinite(scores)
        return jnp.where(applies, jnp.minimum(raised, _HUGE), scores)
