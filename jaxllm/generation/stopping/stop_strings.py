"""Stop strings: rows end when their text does in one of several strings."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.processors.base import History, Scores, store
from jaxllm.generation.stopping.automaton import token_automaton
from jaxllm.generation.stopping.base import Done, StoppingCriteria, stopping_criterion
from jaxllm.tokenizers import Tokenizer

# Smallest buckets of states, classes and tokens: one program serves usual stop strings.
_STATES, _CLASSES, _WINDOW = 64, 128, 16


@stopping_criterion(static=("window",))
class StopStringCriteria(StoppingCriteria):
    """Ends a row whose newest token completes one of ``stop_strings``, a string or several.

    The rule of transformers 5.23: the string ends within the newest token, or where it ends, and
    may have begun in any earlier one, the prompt's too. Tokens count with the bytes that they give
    in the middle of a text (``Tokenizer.token_bytes``), so that the first word of a sentencepiece
    text has a space before it, special tokens are their own text, and a string may be completed by
    a token that ends within a character. An id without a token breaks a match off. Differently
    from transformers, padding is as if it were not there.

    The criterion has no state: it reads the last tokens of the text, as many as the longest string
    has bytes (rounded up), with a precomputed automaton. Other stop strings of about the same
    length compile nothing.

    Args:
        tokenizer: The model's tokenizer.
        stop_strings: What to stop at.

    Raises:
        InputError: There is no string, one is empty, or no token of the vocabulary can complete
            any of them.
    """

    classes: Int[Array, " E"]
    table: Int[Array, "S C"]
    window: int

    def __init__(self, tokenizer: Tokenizer, stop_strings: str | Sequence[str]) -> None:
        patterns = _patterns(stop_strings)
        if not isinstance(tokenizer, Tokenizer):
            raise InputError(
                f"StopStringCriteria: `tokenizer` must be a jaxllm tokenizer, but is {tokenizer!r}"
            )
        classes, table = _bucketed_automaton(tokenizer, patterns)
        if not (table % 2).any():
            raise InputError(
                f"stop_strings: no token of the vocabulary can complete any of {stop_strings!r}; "
                "their last characters are not in it"
            )
        window = bucket(max(map(len, patterns)), _WINDOW)
        store(self, classes=classes, table=table, window=window)

    def reached(self, history: History, scores: Scores) -> Done:
        ids, exists = history.last(self.window)
        unknown = self.classes.shape[0] - 1
        known = exists & (ids >= 0) & (ids < unknown)
        classes = jnp.asarray(self.classes)[jnp.where(known, ids, unknown)]
        table = jnp.asarray(self.table)

        def read(code: Int[Array, " B"], column: Int[Array, " B"]) -> tuple[Array, None]:
            return table[code // 2, column], None

        # Not unrolled: XLA would fuse the chain of look-ups, at an exponential cost.
        code, _ = jax.lax.scan(read, jnp.zeros_like(classes[:, 0]), classes.T)
        return code % 2 == 1


def _patterns(stop_strings: str | Sequence[str]) -> tuple[bytes, ...]:
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    good = isinstance(strings, Sequence) and all(isinstance(s, str) and s for s in strings)
    if not good or not strings:
        raise InputError(
            f"stop_strings: expected a non-empty string or several, found {stop_strings!r}"
        )
    try:
        return tuple(sorted({string.encode("utf-8") for string in strings}))
    except UnicodeEncodeError as failure:
        raise InputError(f"stop_strings: {failure.object!r} holds an unpaired surrogate") from None


@functools.lru_cache(maxsize=8)
def _bucketed_automaton(
    tokenizer: Tokenizer, patterns: tuple[bytes, ...]
) -> tuple[Int[np.ndarray, " E"], Int[np.ndarray, "S C"]]:
    classes, table = token_automaton(tokenizer.token_bytes(), patterns)
    states, columns = table.shape
    rest = (0, bucket(states, _STATES) - states), (0, bucket(columns, _CLASSES) - columns)
    return classes, np.pad(table, rest)
