"""Several examples in one row, so that little of it is padding.

First-fit decreasing (Johnson 1973), within windows of a shuffled order: sorting all examples would
put the same ones together in every epoch. Documents of one row do not see each other; the segment
ids of the batch tell the model which tokens belong together.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

WINDOW_ROWS = 512


def pack(
    lengths: Int[np.ndarray, "N K"],
    order: Int[np.ndarray, " N"],
    limits: tuple[int, ...],
    window_rows: int = WINDOW_ROWS,
) -> list[list[int]]:
    """Rows of examples, each of `order` in exactly one of them.

    Args:
        lengths: Tokens of each example, on each side (encoder and decoder, for T5).
        order: The examples, in the order in which windows of them are packed.
        limits: Tokens that fit in a row, on each side; no example is longer.
        window_rows: As many examples are packed together as fill about this number of rows.

    >>> pack(np.array([[3], [6], [2], [5]]), np.arange(4), (8,))
    [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    shares = (lengths / np.asarray(limits)).max(axis=1)
    window_of = np.cumsum(shares[order]) // window_rows
    for part in np.split(order, np.flatnonzero(np.diff(window_of)) + 1):
        rows += _first_fit(lengths, part[np.argsort(-shares[part], kind="stable")], limits)
    return rows


def _first_fit(
    lengths: Int[np.ndarray, "N K"], order: Int[np.ndarray, " n"], limits: tuple[int, ...]
) -> list[list[int]]:
    """Each example in the first row that has room for it on every side."""
    rows: list[list[int]] = []
    room = np.tile(np.asarray(limits), (len(order), 1))
    for example in order:
        # The row behind the open ones is empty, so that a first fit always exists.
        fits = (room[: len(rows) + 1] >= lengths[example]).all(axis=1)
        row = int(np.argmax(fits))
        if row == len(rows):
            rows.append([])
        rows[row].append(int(example))
        room[row] -= lengths[example]
    return rows
