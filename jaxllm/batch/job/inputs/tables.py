"""Rows of tables: CSV, Parquet, and Hugging Face data sets."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm.batch.job.inputs.columns import ColumnChoice
from jaxllm.batch.job.inputs.source import Source
from jaxllm.common.errors import DataError
from jaxllm.common.messages import shortened
from jaxllm.common.optional_deps import require

_TEXT_COLUMNS = frozenset({"id", "prompt", "completion", "regex", "grammar"})
"""Columns of a CSV file whose cells are texts, even where they look like numbers."""
_MAX_CELL = 2**27
"""Characters of a cell of a CSV file at most; Python's own limit is 128 KiB."""


class Table(Source):
    """Rows of named columns; a cell without a value is as if the row had no such key."""

    def __init__(
        self, name: str, sha256: str, choice: ColumnChoice, columns: Iterable[str]
    ) -> None:
        super().__init__(name, sha256, choice)
        columns = list(columns)
        try:
            self.columns = choice.selected(columns)
        except DataError as error:
            raise DataError(f"{name}: {error}") from None
        self._unread = [column for column in columns if column not in self.columns]

    @abstractmethod
    def cells(self, index: int) -> Mapping[str, Any]:
        """The values of a row, of the columns that are read."""

    def read(self, index: int) -> Mapping[str, Any]:
        cells = {name: value for name, value in self.cells(index).items() if value is not None}
        try:
            return self.choice.apply(cells)
        except DataError as error:
            raise DataError(f"{self.unit} {self.number(index)}: {error}") from None

    def unread_keys(self) -> list[str]:
        return self._unread


class CsvRows(Table):
    """A CSV file with a header. Cells of fields are JSON, or else text; an empty cell is none."""

    def __init__(self, name: str, data: bytes, choice: ColumnChoice, delimiter: str = ",") -> None:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as failure:
            raise DataError(f"{name}: not UTF-8 (byte {failure.start}); save it as UTF-8") from None
        csv.field_size_limit(_MAX_CELL)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        self._rows: list[tuple[int, list[str]]] = []
        line = 1
        try:
            for cells in reader:
                if cells:
                    self._rows.append((line, cells))
                line = reader.line_num + 1
        except csv.Error as failure:
            raise DataError(
                f"{name}: line {line}: {failure}; a cell with quotes needs them doubled"
            ) from None
        if not self._rows:
            raise DataError(f"{name}: is empty; the first line names the columns")
        _, self._header = self._rows.pop(0)
        twice = {column for column, count in Counter(self._header).items() if count > 1}
        super().__init__(name, hashlib.sha256(data).hexdigest(), choice, self._header)
        if twice.intersection(self.columns):
            raise DataError(f"{name}: the column {min(twice)!r} is there twice; rename one")

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, index: int) -> int:
        return self._rows[index][0]

    def cells(self, index: int) -> Mapping[str, Any]:
        number, cells = self._rows[index]
        if len(cells) != len(self._header):
            raise DataError(
                f"line {number}: has {len(cells)} cells, but the header {len(self._header)}"
            )
        row = dict(zip(self._header, cells, strict=True))
        return {name: self._value(name, row[name]) for name in self.columns}

    def _value(self, name: str, cell: str) -> Any:
        if not cell:
            return None
        is_text = name in _TEXT_COLUMNS or name in (self.choice.prompt, self.choice.completion)
        return cell if is_text else _json_or_text(cell)


class ParquetRows(Table):
    """A Parquet file."""

    unit = "row"

    def __init__(self, name: str, data: bytes, choice: ColumnChoice) -> None:
        parquet = require("pyarrow.parquet", extra="parquet", purpose="Parquet files")
        try:
            file = parquet.ParquetFile(io.BytesIO(data))
            names = file.schema_arrow.names
            super().__init__(name, hashlib.sha256(data).hexdigest(), choice, names)
            self._table = file.read(columns=self.columns)
        except (ValueError, OSError) as failure:  # pyarrow's errors
            if isinstance(failure, DataError):
                raise
            reason = shortened(str(failure))
            raise DataError(f"{name}: cannot be read as Parquet ({reason})") from None
        self._columns = {column: self._table.column(column) for column in self.columns}

    def __len__(self) -> int:
        return self._table.num_rows

    def number(self, index: int) -> int:
        return index + 1

    def cells(self, index: int) -> Mapping[str, Any]:
        return {
            name: without_nulls(column[index].as_py()) for name, column in self._columns.items()
        }


class DatasetRows(Table):
    """A Hugging Face data set. Its digest is that of the columns that are read.

    Args:
        dataset: a `datasets.Dataset`.
    """

    unit = "row"

    def __init__(self, name: str, dataset: Any, choice: ColumnChoice) -> None:
        super().__init__(name, "", choice, dataset.column_names)
        self._dataset = dataset.select_columns(self.columns)
        digest = hashlib.sha256()
        for row in self._dataset:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def number(self, index: int) -> int:
        return index + 1

    def cells(self, index: int) -> Mapping[str, Any]:
        return without_nulls(self._dataset[index])


def without_nulls(value: Any) -> Any:
    """A value without the keys that are null: Arrow gives each struct all keys of its column.

    >>> without_nulls([{"role": "user", "content": "Hi", "name": None}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [without_nulls(item) for item in value]
    return value


def _json_or_text(cell: str) -> Any:
    """The value of a cell.

    >>> [_json_or_text(cell) for cell in ("0.5", "true", "[1, 2]", "never")]
    [0.5, True, [1, 2], 'never']
    """
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell
