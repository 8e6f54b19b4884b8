"""Row sources over Python lists and Hugging Face data sets."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from jaxllm.common.errors import DataError, UnsupportedError
from jaxllm.training.data.rows import Row, as_object


class SequenceRows:
    """Rows of a sequence of dicts, such as a list or a ``datasets.Dataset``."""

    def __init__(self, rows: Sequence[Row], name: str = "rows") -> None:
        self._rows = rows
        self.name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        return as_object(self._rows[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    @cached_property
    def _digest(self) -> str:
        return hash_rows(self._rows[index] for index in range(len(self)))

    def sha256(self) -> str:
        """Hash of the rows as JSON lines; values that JSON lacks (dates) as their ``str``."""
        return self._digest


def hash_rows(rows: Iterable[Row]) -> str:
    """SHA-256 of the rows as lines of JSON."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def dataset_rows(dataset: str, name: str | None = None, split: str = "train") -> SequenceRows:
    """Opens a Hugging Face data set: a Hub id, or a folder that ``save_to_disk`` wrote.

    Raises:
        UnsupportedError: the package ``datasets`` is not installed.
        DataError: the data set cannot be loaded, or has no such split.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as failure:
        raise UnsupportedError(
            f"dataset: {dataset!r} needs the package datasets, which cannot be imported "
            f"({failure}): pip install 'jaxllm[datasets]'"
        ) from failure
    folder = Path(dataset).expanduser()
    has_splits, is_one = ((folder / n).is_file() for n in ("dataset_dict.json", "state.json"))
    if name is not None and (has_splits or is_one):
        raise DataError(f"dataset_name: has no effect with the saved data set {folder}")
    if split != "train" and is_one:
        raise DataError(f"split: has no effect, {folder} holds one data set and no splits")
    try:
        if has_splits:
            loaded = datasets.load_from_disk(str(folder))[split]
        elif is_one:
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(dataset, name, split=split)
    except Exception as failure:  # of many kinds: the Hub's, Arrow's, the file system's
        raise DataError(
            f"dataset: {dataset!r}, split {split!r}, cannot be loaded "
            f"({type(failure).__name__}: {failure})"
        ) from failure
    return SequenceRows(loaded, f"{dataset}/{split}")
