"""Several examples in one row, so that little of it is padding.

First-fit decreasing (Johnson 1973), within windows of a shuffled order: sorting all examples would
put the same ones together in every epoch. Documents of one row do not see each other; the segment
ids of the batch tell the model which tokens belong together.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

WINDOW = 2048


def pack(
    lengths: Int[np.ndarray, "N K"],
    order: Int[np.ndarray, " N"],
    limits: tuple[int, ...],
    window: int = WINDOW,
) -> list[list[int]]:
    """Rows of examples, each of `order` in exactly one of them.

    Args:
        lengths: Tokens of each example, on each side (encoder and decoder, for T5).
        order: The examples, in the order in which windows of them are packed.
        limits: Tokens that fit in a row, on each side; no example is longer.
        window: Examples that are packed together.

    >>> pack(np.array([[3], [6], [2], [5]]), np.arange(4), (8,))
    [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    shares = (lengths / np.asarray(limits)).max(axis=1)
    for start in range(0, len(order), window):
        part = order[start : start + window]
        part = part[np.argsort(-shares[part], kind="stable")]
        room = np.tile(np.asarray(limits), (len(part), 1))
        packed: list[list[int]] = []
        for example in part:
            # Beyond the open rows all rows are empty, so that the first fit always exists.
            fits = (room[: len(packed) + 1] >= lengths[example]).all(axis=1)
            row = int(np.argmax(fits))
            if row == len(packed):
                packed.append([])
            packed[row].append(int(example))
            room[row] -= lengths[example]
        rows += packed
    return rows
