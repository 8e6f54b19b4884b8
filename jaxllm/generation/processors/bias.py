"""Processors that bias or forbid token sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import (
    NO_TOKEN,
    TokenIds,
    bucket,
    float_leaf,
    id_table,
    is_integer,
)
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    store,
)


@logits_processor()
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

    words: Int[Array, "N M"]
    bias: Float[Array, " N"]

    def __init__(self, sequence_bias: Mapping[tuple[int, ...], float] | Sequence[Any]) -> None:
        owner = type(self).__name__
        words, biases = zip(*_pairs(owner, sequence_bias), strict=True)
        table = word_table(owner, "sequence_bias", words)
        bias = np.zeros(table.shape[0], np.float32)
        bias[: len(biases)] = [
            float_leaf(owner, "sequence_bias", value, "[-inf, inf]") for value in biases
        ]
        store(self, words=table, bias=bias)

    def process(self, history: History, scores: Scores) -> Scores:
        return _biased(history, scores, self.words, self.bias)


@logits_processor()
class NoBadWordsLogitsProcessor(LogitsProcessor):
    """Forbids the given token sequences, a list of lists of ids.

    A sequence of a single end-of-sequence token is ignored, as in transformers.
    """

    words: Int[Array, "N M"]
    eos_token_id: Int[Array, " E"]

    def __init__(
        self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: TokenIds | None = None
    ) -> None:
        owner = type(self).__name__
        if isinstance(bad_words_ids, str) or not isinstance(bad_words_ids, Sequence):
            raise InputError(
                f"{owner}: `bad_words_ids` must be a list, but is {quoted(bad_words_ids)}"
            )
        if not bad_words_ids:
            raise InputError(f"{owner}: `bad_words_ids` is empty")
        store(
            self,
            words=word_table(owner, "bad_words_ids", bad_words_ids),
            eos_token_id=id_table(
                owner, "eos_token_id", [] if eos_token_id is None else eos_token_id
            ),
        )

    def process(self, history: History, scores: Scores) -> Scores:
        single = jnp.all(self.words[:, :-1] == NO_TOKEN, axis=1)
        is_eos = single & jnp.isin(self.words[:, -1], self.eos_token_id)
        return _biased(history, scores, self.words, jnp.where(is_eos, 0.0, -jnp.inf))


def word_table(owner: str, name: str, words: Sequence[Sequence[int]]) -> Int[Array, "N M"]:
    """Packs sequences of ids into int32 rows, right-aligned and padded with ``NO_TOKEN``.

    Both dimensions are padded to powers of two, so that adding a few sequences or tokens does not
    compile again.

    Raises:
        InputError: a sequence is empty or holds something other than token ids.
    """
    for word in words:
        if isinstance(word, str) or not isinstance(word, Sequence) or not word:
            raise InputError(
                f"{owner}: `{name}` needs non-empty lists of ids, but has {quoted(word)}"
            )
        for item in word:
            if not is_integer(item) or not 0 <= item <= np.iinfo(np.int32).max:
                raise InputError(f"{owner}: `{name}` must hold token ids, but holds {quoted(item)}")
    shape = bucket(len(words), 8), bucket(max(map(len, words)), 4)
    table = np.full(shape, NO_TOKEN, np.int32)
    for row, word in zip(table, words, strict=False):
        row[-len(word) :] = word
    return table  # pyright: ignore[reportReturnType]


def _pairs(owner: str, sequence_bias: Any) -> list[tuple[tuple[int, ...], float]]:
    try:
        items = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias
        pairs = {tuple(ids): bias for ids, bias in items}
    except (TypeError, ValueError):
        pairs = {}
    if not pairs:
        raise InputError(
            f"{owner}: `sequence_bias` must map tuples of ids to numbers, or list [ids, number] "
            f"pairs, and not be empty, but is {quoted(sequence_bias)}"
        )
    return list(pairs.items())


def _biased(
    history: History, scores: Scores, words: Int[Array, "N M"], bias: Float[Array, " N"]
) -> Scores:
    vocab_size = scores.shape[1]
    prefix, last = words[:, :-1], words[:, -1]
    recent, exists = history.last(prefix.shape[1])
    agrees = exists[:, None] & (recent[:, None] == prefix)
    completes: Bool[Array, "B N"] = jnp.all(agrees | (prefix == NO_TOKEN), axis=-1)
    last = jnp.where(last == NO_TOKEN, vocab_size, last)
    added = jnp.zeros_like(scores).at[:, last].add(jnp.where(completes, bias, 0.0), mode="drop")
    return scores + added
