"""Stop strings on the host: the automaton of compiled programs, and a matcher for one sequence.

An automaton of Aho and Corasick (1975) reads bytes. The effect of a token is a table column: for
each state, the next state and whether the token completed a string. Few columns differ (a token
matters only if it continues or completes a string), so the vocabulary is stored as a class per
token and a small table with one column per class.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxllm.generation.inputs.values import bucket
from jaxllm.tokenizers import Tokenizer

# Smallest buckets of states and classes: usual stop strings share one program.
_STATES, _CLASSES = 64, 128


@functools.lru_cache(maxsize=8)
def bucketed_automaton(
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


class StopStringMatcher:
    """Finds the token that completes a stop string, by the rule of `StopStringCriteria`.

    The string ends within or at the end of the newest token, and may begin in any earlier one, the
    prompt included. A token counts as its bytes in the middle of a text; an id without a token ends
    every partial match.

    Args:
        prompt: token ids before the first new token.
    """

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Iterable[int] = ()
    ) -> None:
        self._bytes = tokenizer.token_bytes()
        self._patterns = [string.encode("utf-8") for string in strings]
        self._kept = max(map(len, self._patterns)) - 1
        self._tail = b""
        for token in prompt:
            self._extend(token)

    def completes(self, token: int) -> bool:
        """Adds a new token; True if it completes a stop string."""
        before = self._tail
        text = self._extend(token)
        return any(text.find(p, max(len(before) - len(p) + 1, 0)) >= 0 for p in self._patterns)

    def first_end(self, tokens: Iterable[int]) -> int | None:
        """Adds new tokens up to the one that completes a stop string, and returns their number.
        None if no token does."""
        return next((count for count, x in enumerate(tokens, 1) if self.completes(x)), None)

    def _extend(self, token: int) -> bytes:
        """The end of the text, the token included; keeps what may be the start of a match."""
        content = self._bytes[token] if token < len(self._bytes) else None
        if content is None:
            self._tail = b""
            return b""
        text = self._tail + content
        self._tail = text[max(len(text) - self._kept, 0) :]
        return text
