"""Pads lists of token ids to a batch with a padding mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

from jaxllm.common.errors import InputError, TokenizerError

PaddingSide = Literal["left", "right"]
Bucket = int | Literal["power_of_two"] | None


@dataclass(frozen=True)
class BatchEncoding:
    """A batch of prompts, padded to one length.

    ``attention_mask`` is 1 at real tokens and 0 at padding. Only the mask marks padding, since the
    pad id may also be a real token.
    """

    input_ids: Int32[np.ndarray, "B T"]
    attention_mask: Int32[np.ndarray, "B T"]

    # `keys` and `__getitem__` make ``model(**tokenizer(texts))`` work, as in transformers.

    def keys(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self))

    def __getitem__(self, name: str) -> Int32[np.ndarray, "B T"]:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)


def pad_rows(
    rows: Sequence[Sequence[int]], pad: int, side: PaddingSide, bucket: Bucket
) -> BatchEncoding:
    """Pads one or more rows to the bucket of the longest row.

    >>> batch = pad_rows([[5, 6, 7], [8]], 0, "left", 4)
    >>> batch.input_ids.tolist(), batch.attention_mask.tolist()
    ([[0, 5, 6, 7], [0, 0, 0, 8]], [[0, 1, 1, 1], [0, 0, 0, 1]])
    """
    length = bucket_length(max(len(row) for row in rows), bucket)
    input_ids = np.full((len(rows), length), pad, np.int32)
    attention_mask = np.zeros((len(rows), length), np.int32)
    for number, row in enumerate(rows):
        columns = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        input_ids[number, columns] = row
        attention_mask[number, columns] = 1
    return BatchEncoding(input_ids, attention_mask)


def bucket_length(length: int, bucket: Bucket) -> int:
    """Rounds a length up to its bucket.

    >>> bucket_length(9, None), bucket_length(9, 8), bucket_length(9, "power_of_two")
    (9, 16, 16)
    """
    if bucket is None:
        return length
    if bucket == "power_of_two":
        return 1 << (length - 1).bit_length()
    if isinstance(bucket, bool) or not isinstance(bucket, int) or bucket < 1:
        raise InputError(f"bucket is {bucket!r}: give None, a positive int or 'power_of_two'")
    return -(-length // bucket) * bucket


def checked_side(
    side: Any, error: type[InputError] | type[TokenizerError], where: str = ""
) -> PaddingSide:
    """Returns ``side``, or raises ``error`` unless it is "left" or "right"."""
    if side not in ("left", "right"):
        raise error(f"{where}padding_side is {side!r}: it must be 'left' or 'right'")
    return side
