"""Stop strings: a row ends when its newest token completes one of several strings.

An automaton of Aho and Corasick (1975) reads bytes. The effect of a token is a table column: for
each state, the next state and whether the token completed a string. Few columns differ (a token
matters only if it continues or completes a string), so the vocabulary is stored as a class per
token and a small table with one column per class.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.processors.base import History, Scores, store
from jaxllm.generation.stopping.base import Done, StoppingCriteria, stopping_criterion
from jaxllm.tokenizers import Tokenizer

# Smallest buckets of states, classes and tokens: usual stop strings share one program.
_STATES, _CLASSES, _WINDOW = 64, 128, 16


@stopping_criterion(static=("window",))
class StopStringCriteria(StoppingCriteria):
    """Ends a row whose newest token completes one of ``stop_strings``, a string or several.

    Follows transformers 5.23: the string ends within or at the end of the newest token, and may
    begin in any earlier token, the prompt included. A token counts as the bytes that it has in the
    middle of a text (``Tokenizer.token_bytes``). So the first word of a sentencepiece text has a
    space before it, special tokens count as their own text, and a token that ends within a
    character may complete a string. An id without a token ends every partial match. Padding is
    ignored, unlike in transformers.

    The criterion has no state: a precomputed automaton reads the last tokens of the row, as many as
    the longest string has bytes (rounded up). Changing to stop strings of similar length does not
    compile again.

    Args:
        tokenizer: the model's tokenizer.
        stop_strings: the strings.

    Raises:
        InputError: there is no string, one is empty, or no token of the vocabulary can complete
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
                "stop_strings: no token of the vocabulary can complete any of "
                f"{quoted(stop_strings)}; "
                "their last characters are not in it"
            )
        window = bucket(max(map(len, patterns)), _WINDOW)
        store(self, classes=classes, table=table, window=window)

    def reached(self, history: History, scores: Scores | None) -> Done:
        ids, exists = history.last(self.window)
        unknown = self.classes.shape[0] - 1
        known = exists & (ids >= 0) & (ids < unknown)
        classes = jnp.asarray(self.classes)[jnp.where(known, ids, unknown)]
        table = jnp.asarray(self.table)

        def read(code: Int[Array, " B"], column: Int[Array, " B"]) -> tuple[Array, None]:
            return table[code // 2, column], None

        # Not unrolled: XLA would fuse the chain of lookups, at exponential cost.
        code, _ = jax.lax.scan(read, jnp.zeros_like(classes[:, 0]), classes.T)
        return code % 2 == 1


def _patterns(stop_strings: str | Sequence[str]) -> tuple[bytes, ...]:
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    good = isinstance(strings, Sequence) and all(isinstance(s, str) and s for s in strings)
    if not good or not strings:
        raise InputError(
            f"stop_strings: expected a non-empty string or several, found {quoted(stop_strings)}"
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


def byte_automaton(
    patterns: Sequence[bytes],
) -> tuple[Int[np.ndarray, "S 256"], Bool[np.ndarray, " S"]]:
    """Builds the next state for each state and byte, and a mask of states that complete a pattern.

    State 0 is the start. Every other state is a pattern prefix: the longest one that is a suffix of
    the bytes so far.

    >>> following, complete = byte_automaton([b"ab"])
    >>> a = following[0, ord("a")]
    >>> int(a), int(following[a, ord("b")]), int(following[a, ord("c")]), complete.tolist()
    (1, 2, 0, [False, False, True])
    """
    children: list[dict[int, int]] = [{}]
    ends = set()
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
            state = children[state][byte]
        ends.add(state)
    following = np.zeros((len(children), 256), np.int32)
    complete = np.zeros(len(children), bool)
    complete[list(ends)] = True
    # Breadth first, so that the longest proper suffix of a state is ready before the state.
    suffix = [0] * len(children)
    queue = [0]
    for state in queue:
        if state:
            following[state] = following[suffix[state]]
            complete[state] |= complete[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = following[state, byte]
            following[state, byte] = child
            queue.append(child)
    return following, complete


def token_automaton(
    tokens: Sequence[bytes | None], patterns: Sequence[bytes]
) -> tuple[Int[np.ndarray, " E"], Int[np.ndarray, "S C"]]:
    """Builds the class of each token, and the effect of each class on each state.

    Args:
        tokens: the bytes of each id. None ends every partial match, and so does an id beyond the
            list, whose class is the last of ``classes``. Empty bytes leave the state unchanged.
        patterns: the strings to find, as non-empty bytes.

    Returns:
        ``classes``, and ``table[state, class]``: twice the next state, plus one if a pattern ended
        within the token.
    """
    following, complete = byte_automaton(patterns)
    # A code is 2 * state + ended; `ended` is sticky. Bytes with equal effects are one symbol.
    codes = np.arange(2 * len(following))
    after = following[codes // 2]
    step = 2 * after + (complete[after] | (codes % 2 == 1)[:, None])
    step, symbols = np.unique(step, axis=1, return_inverse=True)
    symbols = symbols.reshape(-1)

    columns = [codes[::2], np.zeros_like(codes[::2])]
    class_of = {column.tobytes(): number for number, column in enumerate(columns)}
    unchanged, broken = range(2)
    classes = np.array([broken if t is None else unchanged for t in (*tokens, None)])
    lengths = np.array([len(token or b"") for token in (*tokens, None)])
    starts = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join(token or b"" for token in tokens), np.uint8)
    # Reads byte `position` of all tokens at once; tokens with equal effects so far share a class.
    for position in range(lengths.max()):
        active = np.flatnonzero(lengths > position)
        read = symbols[text[starts[active] + position]]
        pairs, inverse = np.unique(classes[active] * step.shape[1] + read, return_inverse=True)
        numbers = []
        for before, symbol in zip(*np.divmod(pairs, step.shape[1]), strict=True):
            column = step[columns[before], symbol]
            number = class_of.setdefault(column.tobytes(), len(columns))
            if number == len(columns):
                columns.append(column)
            numbers.append(number)
        classes[active] = np.array(numbers)[inverse]
    used, classes = np.unique(classes, return_inverse=True)
    table = np.stack([columns[number] for number in used], axis=1)
    return classes.astype(np.int32), table.astype(np.int32)
