"""Rows of tables: CSV, Parquet, and Hugging Face data sets."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from abc import abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.batch.job.inputs.columns import ColumnChoice, MissingCellError
from jaxllm.batch.job.inputs.content import MAX_INPUT_BYTES, MAX_ROW_BYTES, check_row_count
from jaxllm.batch.job.inputs.json_lines import BOM
from jaxllm.batch.job.inputs.source import Source
from jaxllm.common.errors import DataError, shortened
from jaxllm.common.optional_packages import require

_TEXT_COLUMNS = frozenset({"id", "prompt", "completion", "regex", "grammar"})
"""Columns of a CSV file whose cells are texts, even where they look like numbers."""
_LINE = re.compile(rb"[^\r\n]+(?:\r\n?|\n)?|\r\n?|\n")
"""A line with its end; the last one may have none."""
_MAX_LINES = 2**24


class TableSource(Source):
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
        except MissingCellError as error:
            message = f"{self.unit} {self.number(index)}: {error}"
            raise MissingCellError(message, error.row_id) from None

    def unread_keys(self) -> list[str]:
        return self._unread


class CsvRows(TableSource):
    """A CSV file with a header. Cells of fields are JSON, or else text; an empty cell is none."""

    def __init__(self, name: str, data: bytes, choice: ColumnChoice, delimiter: str = ",") -> None:
        csv.field_size_limit(MAX_ROW_BYTES)
        self._data, self._delimiter = data, delimiter
        # Positions of rows, since their cells would take many times the bytes of the file.
        self._numbers, self._starts, self._stops = array("Q"), array("Q"), array("Q")
        self._header = self._find_rows(name)
        super().__init__(name, hashlib.sha256(data).hexdigest(), choice, self._header)
        counts = Counter(self._header)
        twice = [column for column in self.columns if counts[column] > 1]
        if twice:
            raise DataError(f"{name}: the column {min(twice)!r} is there twice; rename one")

    def _find_rows(self, name: str) -> list[str]:
        """Finds where the rows stand, and returns the header."""
        header: list[str] | None = None
        number, start, position = 1, len(BOM) if self._data.startswith(BOM) else 0, 0

        def lines() -> Iterator[str]:
            nonlocal position
            for count, match in enumerate(_LINE.finditer(self._data, start)):
                position = match.end()
                if position - start > MAX_ROW_BYTES:
                    raise DataError(
                        f"{name}: line {number}: a row of more than {MAX_ROW_BYTES} bytes; "
                        "perhaps a quote is not closed"
                    )
                if count >= _MAX_LINES:
                    raise DataError(f"{name}: has more than {_MAX_LINES} lines; split it")
                yield match.group().decode("utf-8")

        reader = csv.reader(lines(), delimiter=self._delimiter, strict=True)
        try:
            for cells in reader:
                if cells and header is None:
                    header = cells
                elif cells:
                    self._numbers.append(number)
                    self._starts.append(start)
                    self._stops.append(position)
                    check_row_count(name, len(self._numbers))
                number, start = reader.line_num + 1, position
        except UnicodeDecodeError:
            raise DataError(f"{name}: line {number}: not UTF-8; save it as UTF-8") from None
        except csv.Error as failure:
            raise DataError(
                f"{name}: line {number}: {failure}; a cell with quotes needs them doubled"
            ) from None
        if header is None:
            raise DataError(f"{name}: is empty; the first line names the columns")
        return header

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, index: int) -> int:
        return self._numbers[index]

    def cells(self, index: int) -> Mapping[str, Any]:
        text = self._data[self._starts[index] : self._stops[index]].decode("utf-8")
        cells = next(csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter))
        if len(cells) != len(self._header):
            raise DataError(
                f"line {self.number(index)}: has {len(cells)} cells, but the header "
                f"{len(self._header)}"
            )
        row = dict(zip(self._header, cells, strict=True))
        return {name: self._value(name, row[name]) for name in self.columns}

    def _value(self, name: str, cell: str) -> Any:
        if not cell:
            return None
        is_text = name in _TEXT_COLUMNS or name in (self.choice.prompt, self.choice.completion)
        return cell if is_text else _json_or_text(cell)


class ParquetRows(TableSource):
    """A Parquet file."""

    unit = "row"

    def __init__(self, name: str, data: bytes, choice: ColumnChoice) -> None:
        parquet = require("pyarrow.parquet", extra="parquet", purpose="Parquet files")
        try:
            file = parquet.ParquetFile(io.BytesIO(data))
            names = file.schema_arrow.names
            super().__init__(name, hashlib.sha256(data).hexdigest(), choice, names)
            self._table = _read_within_limits(name, file, self.columns)
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


class DatasetRows(TableSource):
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


def _read_within_limits(name: str, file: Any, columns: Sequence[str]) -> Any:
    """The columns of a `ParquetFile`; a few bytes of it can stand for many values.

    Raises:
        DataError: they have more than `MAX_ROWS` rows or `MAX_INPUT_BYTES` bytes.
    """
    arrow = require("pyarrow", extra="parquet", purpose="Parquet files")
    check_row_count(name, file.metadata.num_rows)
    batches, size = [], 0
    for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
        batches.append(batch)
        size += batch.nbytes
        if size > MAX_INPUT_BYTES:
            raise DataError(f"{name}: its values take more than {MAX_INPUT_BYTES} bytes; split it")
    schema = arrow.schema([file.schema_arrow.field(column) for column in columns])
    return arrow.Table.from_batches(batches, schema)


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
