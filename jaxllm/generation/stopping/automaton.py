"""An automaton that reads tokens and knows when one of several strings is completed.

The automaton of Aho and Corasick (1975) reads bytes. What a token does to it depends on the state
that it finds, so a token is a column: for each state before, the state after and whether a string
was completed on the way. Few columns differ (a token matters only where it continues or completes
a string), so that a vocabulary is a class per token and a small table of columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int


def byte_automaton(
    patterns: Sequence[bytes],
) -> tuple[Int[np.ndarray, "S 256"], Bool[np.ndarray, " S"]]:
    """The next state after each state and byte, and the states in which a pattern was completed.

    State 0 is the start; every other state is a prefix of a pattern, the longest that the bytes so
    far end in.

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
    """The class of each token, and what each class does to each state.

    Args:
        tokens: The bytes of each id; None breaks off every match, as does an id beyond them, whose
            class is the last. Empty bytes leave the state as it is.
        patterns: What is looked for; none is empty.

    Returns:
        ``classes``, and ``table[state, class]``: twice the next state, plus one if a pattern ended
        within the token.
    """
    following, complete = byte_automaton(patterns)
    # A code is 2 * state + ended, and `ended` stays. Bytes that do the same are one symbol.
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
    # All tokens read their bytes side by side; those that have done the same so far are one class.
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
