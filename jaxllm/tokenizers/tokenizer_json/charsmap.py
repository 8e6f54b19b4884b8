"""Checks the normalization table (charsmap) of a sentencepiece model, as tokenizer.json holds it.

The table is the size of a trie in 4 bytes, the trie (a double array of darts-clone, in units of
4 bytes), and replacements in UTF-8 that end in a zero byte. The library panics at a trie that
leads out of the array, and its panics print to stderr.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np

_IS_VALUE = 1 << 31


def is_charsmap(value: object) -> bool:
    """True for base64 of a table whose trie stays within its array and its replacements."""
    if not isinstance(value, str):
        return False
    try:
        table = base64.b64decode(value, validate=True)
        size = int.from_bytes(table[:4], "little")
        table[4 + size :].decode("utf-8")
    except (binascii.Error, ValueError):
        return False
    if not (size % 4 == 0 and 0 < size <= len(table) - 4):
        return False
    units = np.frombuffer(table, "<u4", size // 4, offset=4)
    return _stays_inside(units, np.frombuffer(table, np.uint8, offset=4 + size))


def _stays_inside(units: np.ndarray, replacements: np.ndarray) -> bool:
    """True if children of all nodes are units, and values are starts of characters or the end."""
    nodes = np.flatnonzero(units < _IS_VALUE)
    nodes = np.union1d(nodes, [0])  # the root is read as a node whatever it is
    node = units[nodes].astype(np.int64)
    offsets = (node >> 10) << ((node & 512) >> 6)
    children = nodes ^ offsets  # of which each byte of a text chooses one of 256
    if (children | 255).max() >= len(units):
        return False
    values = units[children[(node & 256) != 0]].astype(np.int64) & (_IS_VALUE - 1)
    inner = values[values < len(replacements)]
    is_continuation = (replacements[inner] & 0xC0) == 0x80
    return bool((values <= len(replacements)).all() and not is_continuation.any())
