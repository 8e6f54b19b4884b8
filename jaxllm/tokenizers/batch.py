"""Batches of token ids: their forms, truncation, padding to one length, and the padding mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int32

from jaxllm.common.arguments import checked, checked_iterable, checked_list
from jaxllm.common.errors import InputError, TokenizerError, UnsupportedError, quoted
from jaxllm.common.field_mapping import ArrayMapping, FieldMapping

PaddingSide = Literal["left", "right"]
Padding = bool | Literal["longest", "max_length", "do_not_pad"]
Truncation = bool | Literal["longest_first", "only_first", "only_second", "do_not_truncate"] | None
Span = tuple[int, int]
"""Start and end of a token in its text, in characters."""
Bucket = int | Literal["power_of_two"] | None
ReturnTensors = Literal["np", "jax"] | None
FILLERS = {"attention_mask": 0, "offset_mapping": (0, 0), "special_tokens_mask": 1}
"""Values at padding, of what an encoding has beside its ids."""
_SETTABLE = ("labels", "decoder_input_ids", "decoder_attention_mask")


class _Settable:
    """Base of encodings that take what the decoder gets."""

    def __setitem__(self, name: str, value: Any) -> None:
        """Sets what the decoder gets, as training scripts do: ``batch["labels"] = ...``."""
        if name not in _SETTABLE:
            raise InputError(
                f"{name}: only {', '.join(_SETTABLE)} can be set; make a dict, {{**batch, ...}}"
            )
        object.__setattr__(self, name, value)


@dataclass(frozen=True, eq=False)
class BatchEncoding(_Settable, ArrayMapping):
    """A batch of prompts, padded to one length; also a mapping: ``model(**batch)``.

    ``attention_mask`` is 1 at real tokens and 0 at padding. Only the mask marks padding, since the
    pad id may also be a real token.
    """

    input_ids: Int32[Any, "B T"]
    attention_mask: Int32[Any, "B T"]
    offset_mapping: Int32[Any, "B T 2"] | None = None
    """Start and end of each token in its text, with ``return_offsets_mapping``; else None."""
    special_tokens_mask: Int32[Any, "B T"] | None = None
    """1 at added tokens and padding, with ``return_special_tokens_mask``; else None."""
    length: Int32[Any, " B"] | None = None
    """Length of each row, padding included, with ``return_length``; else None."""
    labels: Any = None
    """Labels of the rows that ``pad`` got, of ``text_target``, or that were set, [B] or [B, N]."""
    decoder_input_ids: Any = None
    """Inputs of a decoder that were set, [B, D]."""
    decoder_attention_mask: Any = None
    """Their padding mask that was set, [B, D]."""


@dataclass(frozen=True, eq=False)
class ListEncoding(_Settable, FieldMapping):
    """Ids and mask of a text, or of several, as lists (``return_tensors=None``); also a mapping.

    The fields are those of `BatchEncoding`. Before padding, the rows have different lengths.
    """

    input_ids: list[int] | list[list[int]]
    attention_mask: list[int] | list[list[int]] | None = None
    offset_mapping: list[Span] | list[list[Span]] | None = None
    special_tokens_mask: list[int] | list[list[int]] | None = None
    length: list[int] | None = None
    labels: list[Any] | None = None
    decoder_input_ids: list[Any] | None = None
    decoder_attention_mask: list[Any] | None = None


def unpadded_rows(rows: Any) -> ListEncoding:
    """Rows of a batch: from lists of ids, from dicts with ``input_ids``, or from a dict of lists.

    >>> rows = unpadded_rows([{"input_ids": [5], "labels": 1}, {"input_ids": [6, 7], "labels": 0}])
    >>> rows.input_ids, rows.labels
    ([[5], [6, 7]], [1, 0])
    """
    if not isinstance(rows, Mapping):
        rows = list(checked_iterable(rows, "rows", "lists of token ids"))
    if isinstance(rows, Mapping):
        columns = {
            name: checked_list(values, name) for name, values in rows.items() if values is not None
        }
    elif rows and all(isinstance(row, Mapping) for row in rows):
        names = dict.fromkeys(name for row in rows for name in row)
        for number, row in enumerate(rows):
            if row.keys() != names.keys():
                raise InputError(f"row {number} has {sorted(row)}, another {sorted(names)}")
        columns = {name: [row[name] for row in rows] for name in names}
    else:
        columns = {"input_ids": rows}
    unknown = columns.keys() - {"input_ids", *FILLERS, "labels"}
    if unknown or "input_ids" not in columns:
        raise InputError(
            f"rows have {sorted(columns)}: pad takes input_ids, attention_mask, offset_mapping,"
            " special_tokens_mask and labels"
        )
    for name, values in columns.items():
        if name != "labels" and not all(hasattr(row, "__len__") for row in values):
            name = "rows" if name == "input_ids" else name
            raise InputError(f"{name}: expected lists of token ids, found {quoted(values)}")
    sizes = {name: list(map(len, values)) for name, values in columns.items() if name != "labels"}
    for name in sizes:
        if sizes[name] != sizes["input_ids"]:
            raise InputError(f"{name}: its rows have other lengths than those of input_ids")
    return ListEncoding(**columns)


def padded_rows(rows: ListEncoding, pad: int, side: PaddingSide, length: int) -> BatchEncoding:
    """Pads one or more rows to ``length``.

    >>> batch = padded_rows(ListEncoding([[5, 6, 7], [8]]), 0, "left", 4)
    >>> batch.input_ids.tolist(), batch.attention_mask.tolist()
    ([[0, 5, 6, 7], [0, 0, 0, 8]], [[0, 1, 1, 1], [0, 0, 0, 1]])
    """
    ids = [_checked_row(row, number) for number, row in enumerate(rows.input_ids)]
    columns = {"attention_mask": [[1] * len(row) for row in ids], **rows, "input_ids": ids}
    labels = columns.pop("labels", None)
    fillers = {"input_ids": pad, **FILLERS}
    arrays: Any = {
        name: np.asarray(pad_values(values, fillers[name], side, length), np.int32)
        for name, values in columns.items()
    }
    return BatchEncoding(**arrays, labels=None if labels is None else _label_array(labels))


def _checked_row(row: Any, number: int) -> list[int]:
    if len(row) == 0:
        return []
    try:
        ids = np.asarray(row)
    except ValueError:  # lists of different lengths
        ids = np.asarray(None)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InputError(f"row {number} is {str(row)[:60]}: expected a list of token ids")
    low, high = ids.min(), ids.max()
    if low < 0 or high >= 2**31:
        raise InputError(f"row {number} has ids from {low} to {high}: expected 0 or more")
    return ids.tolist()


def _label_array(labels: list[Any]) -> np.ndarray:
    try:
        return np.asarray(labels)
    except ValueError:
        raise InputError("labels: rows of different lengths; pad them first, with -100") from None


def pad_values(
    rows: Sequence[Sequence[Any]], filler: object, side: PaddingSide, length: int
) -> list[list[Any]]:
    """Pads lists of any values to one length.

    >>> pad_values([[1, 1], [1]], 0, "left", 3)
    [[0, 1, 1], [0, 0, 1]]
    """
    fillers = [[filler] * (length - len(row)) for row in rows]
    if side == "left":
        return [extra + list(row) for extra, row in zip(fillers, rows, strict=True)]
    return [list(row) + extra for extra, row in zip(fillers, rows, strict=True)]


def as_tensors(batch: BatchEncoding, return_tensors: ReturnTensors) -> BatchEncoding:
    """NumPy arrays as they are, or as JAX arrays."""
    if return_tensors == "jax":
        import jax.numpy as jnp  # takes more than a second, and is not needed for text

        return BatchEncoding(**{name: jnp.asarray(value) for name, value in batch.items()})
    return batch


def padded_length(
    rows: Sequence[Sequence[int]],
    padding: Padding,
    max_length: int | None,
    bucket: Bucket,
) -> int | None:
    """Length to pad rows to; None for no padding.

    >>> rows = [[5, 6, 7], [8]]
    >>> padded_length(rows, True, None, 8), padded_length(rows, "max_length", 5, None)
    (8, 5)
    """
    longest = max(map(len, rows))
    if padding is False or padding == "do_not_pad":
        return None
    if padding is True or padding == "longest":
        return bucket_length(longest, bucket)
    if padding == "max_length":
        if max_length is None:
            raise InputError("padding='max_length' needs max_length: the tokenizer has none")
        return bucket_length(max(longest, max_length), bucket)
    raise InputError(
        f"padding is {quoted(padding)}: give True ('longest'), 'max_length' or False ('do_not_pad')"
    )


def bucket_length(length: int, bucket: Bucket) -> int:
    """Rounds a length up to its bucket.

    >>> bucket_length(9, None), bucket_length(9, 8), bucket_length(9, "power_of_two")
    (9, 16, 16)
    """
    if bucket is None:
        return length
    if bucket == "power_of_two":
        return 1 << (length - 1).bit_length()
    if isinstance(bucket, bool) or not isinstance(bucket, int | np.integer) or bucket < 1:
        known = "a positive int, or for bucket 'power_of_two'"
        raise InputError(f"bucket, pad_to_multiple_of: expected {known}, found {quoted(bucket)}")
    return -(-length // int(bucket)) * int(bucket)


def truncate(
    ids: list[int],
    pair: list[int] | None,
    length: int,
    strategy: Truncation,
    side: PaddingSide,
) -> tuple[list[int], list[int] | None]:
    """Cuts one or two sequences so that together they have at most ``length`` ids.

    The lengths are those of the tokenizers library. ``side`` is the side that is cut off.

    >>> truncate([1, 2, 3], None, 2, "longest_first", "right")
    ([1, 2], None)
    >>> truncate([1, 2, 3, 4], [5, 6], 4, "longest_first", "left")
    ([3, 4], [5, 6])
    """
    sizes = [len(ids), 0 if pair is None else len(pair)]
    excess = sum(sizes) - length
    if excess <= 0:
        return ids, pair
    if length < 0:
        raise InputError(f"max_length leaves no room: the special tokens alone are {-length} more")
    if strategy in (True, "longest_first"):
        sizes = [length, 0] if pair is None else _longest_first(sizes[0], sizes[1], length)
    elif strategy in ("only_first", "only_second"):
        cut = 0 if strategy == "only_first" else 1
        if sizes[cut] <= excess:
            raise InputError(
                f"truncation={strategy!r} would have to remove {excess} tokens, but that sequence"
                f" has {sizes[cut]}: raise max_length, or use 'longest_first'"
            )
        sizes[cut] -= excess
    return _cut(ids, sizes[0], side), None if pair is None else _cut(pair, sizes[1], side)


def _longest_first(first: int, second: int, length: int) -> list[int]:
    """Lengths of a truncated pair: the longer one is cut first, down to the shorter one."""
    shorter, longer = sorted((first, second))
    longer = shorter if shorter > length else max(shorter, length - shorter)
    if shorter + longer > length:
        shorter = length // 2
        longer = shorter + length % 2
    return [shorter, longer] if first <= second else [longer, shorter]


def _cut(ids: list[int], size: int, side: PaddingSide) -> list[int]:
    return ids[:size] if side == "right" else ids[len(ids) - size :]


def check_truncation(truncation: Truncation) -> bool:
    """True if texts are truncated; raises InputError for an unknown strategy."""
    checked(truncation, (bool, str, type(None)), "truncation", "True, False or a strategy")
    if truncation in (None, False, "do_not_truncate"):
        return False
    if truncation not in (True, "longest_first", "only_first", "only_second"):
        raise InputError(
            f"truncation is {quoted(truncation)}: give True ('longest_first'), 'only_first',"
            " 'only_second' or False ('do_not_truncate')"
        )
    return True


def check_return_tensors(return_tensors: object) -> None:
    """Raises unless arrays of NumPy or JAX, or lists, are asked for."""
    checked(return_tensors, (str, type(None)), "return_tensors", "'np', 'jax' or None (lists)")
    if return_tensors in ("pt", "tf", "mlx"):
        raise UnsupportedError(f"return_tensors={return_tensors!r}: give 'np' or 'jax'")
    if return_tensors not in ("np", "jax", None):
        found = quoted(return_tensors)
        raise InputError(f"return_tensors is {found}: give 'np', 'jax' or None (lists)")


def checked_side(
    side: object, error: type[InputError] | type[TokenizerError], name: str = "padding_side"
) -> PaddingSide:
    """Returns ``side``, or raises ``error`` unless it is "left" or "right"."""
    if not isinstance(side, str) or side not in ("left", "right"):
        raise error(f"{name} is {quoted(side)}: it must be 'left' or 'right'")
    return side
