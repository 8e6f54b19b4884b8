"""Rows of a plan as the arrays of one batch, under the names of the models' arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.models.input_checks import IGNORED
from jaxllm.training.data.config import ModelInfo
from jaxllm.training.data.example import Example

Batch = dict[str, np.ndarray]
Rows = Sequence[Sequence[Example]]


def collate(
    rows: Rows, shape: tuple[int, ...], model: ModelInfo, *, packed: bool, like: np.ndarray
) -> Batch:
    """Arrays of `rows`, padded on the right; a row without examples is padding as a whole.

    Args:
        rows: The examples of each row, one at most unless packed.
        shape: Length of the rows, on each side.
        model: Its `kind` decides what labels are, its pad id fills `input_ids`.
        packed: Whether rows have `segment_ids` in place of `attention_mask`.
        like: The labels of any example, for a classifier's rows that have none.

    Returns:
        int32 [B, T]: `input_ids`, and `attention_mask` or `segment_ids` (0 at pads, documents 1,
        2, ...). `labels` int32 [B, T], -100 where nothing is learnt; for seq2seq [B, D], packed
        with `decoder_segment_ids`. Classification: `labels` int32 [B], or float32 [B] or [B, C]
        beside `weights` float32 [B], 0 at rows that do not count.
    """
    inputs = [[example.input_ids for example in row] for row in rows]
    batch = {"input_ids": _fill(inputs, shape[0], model.pad_token_id or 0)}
    if packed:
        batch["segment_ids"] = _fill(_numbers(inputs), shape[0], 0)
    else:
        batch["attention_mask"] = _fill(
            [[np.ones_like(x) for x in row] for row in inputs], shape[0], 0
        )
    if model.kind == "classification":
        return batch | _row_labels(rows, like)
    labels = [[example.labels for example in row] for row in rows]
    batch["labels"] = _fill(labels, shape[-1], IGNORED)
    if packed and model.kind == "seq2seq":
        batch["decoder_segment_ids"] = _fill(_numbers(labels), shape[1], 0)
    return batch


def _fill(rows: Sequence[Sequence[np.ndarray]], length: int, value: int) -> np.ndarray:
    """Each row's arrays one after the other, then `value`."""
    result = np.full((len(rows), length), value, np.int32)
    for number, arrays in enumerate(rows):
        if arrays:
            joined = np.concatenate(arrays)
            result[number, : len(joined)] = joined
    return result


def _numbers(rows: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """1 in place of each token of a row's first array, 2 in the second, ..."""
    return [[np.full_like(x, number) for number, x in enumerate(row, 1)] for row in rows]


def _row_labels(rows: Rows, like: np.ndarray) -> Batch:
    real = np.array([len(row) > 0 for row in rows])
    ignored = np.full_like(like, IGNORED if like.dtype == np.int32 else 0)
    labels = np.stack([row[0].labels if row else ignored for row in rows])
    if labels.dtype == np.int32:
        return {"labels": labels}
    return {"labels": labels, "weights": real.astype(np.float32)}
