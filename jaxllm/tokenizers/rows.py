"""Rows of a batch before padding, in the forms in which callers have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.common.arguments import checked_iterable, checked_list
from jaxllm.common.errors import InputError, quoted
from jaxllm.tokenizers.batch import Span


@dataclass(frozen=True)
class UnpaddedRows:
    """Values of rows of any length, before padding; None: not present."""

    input_ids: Sequence[Sequence[int]]
    attention_mask: list[Sequence[int]] | None = None
    offset_mapping: list[list[Span]] | None = None
    special_tokens_mask: list[list[int]] | None = None
    labels: list[Any] | None = None


def unpadded_rows(rows: Any) -> UnpaddedRows:
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
    unknown = columns.keys() - UnpaddedRows.__annotations__.keys()
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
    return UnpaddedRows(**columns)


def label_array(labels: list[Any]) -> np.ndarray:
    """Labels as an array; raises InputError for rows of different lengths."""
    try:
        return np.asarray(labels)
    except ValueError:
        raise InputError("labels: rows of different lengths; pad them first, with -100") from None
