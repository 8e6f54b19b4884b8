"""Tables: the rows of JSONL, CSV and Parquet files, and of data sets."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

from jaxllm.common.cells import Cells
from jaxllm.common.errors import DataError, InputError, JaxLLMError, shortened
from jaxllm.common.files import parse_json
from jaxllm.common.optional_packages import require

MAX_INPUT_BYTES = 2**30
"""Largest input, after decompression."""
MAX_ROW_BYTES = 2**24
"""Longest row of a file of lines."""
MAX_ROWS = 2**22
"""Most rows of an input."""
BOM = b"\xef\xbb\xbf"
CONTENT = re.compile(rb"\S[^\n]*")
"""The rest of a line that is not blank, from its first byte that is no white space."""
_LINE = re.compile(rb"[^\r\n]+(?:\r\n?|\n)?|\r\n?|\n")
"""A line with its end; the last one may have none."""
_MAX_LINES = 2**24
_HEADER_BYTES = 2**16
"""Bytes of each line of a header that are searched for a delimiter."""


def check_row_count(name: str, count: int) -> None:
    """Raises DataError if an input has more rows than `MAX_ROWS`."""
    if count > MAX_ROWS:
        raise DataError(f"{name}: has more than {MAX_ROWS} rows; split it, a job for each part")


class Table(ABC):
    """Rows of named columns.

    Attributes:
        name: the file, for messages and the report.
        unit: what a row is in messages, "line" or "row".
        repeated: columns whose name another column has too.
        has_texts: every cell is a text.
        is_typed: columns have Arrow types, see `arrow`.
    """

    unit: str = "row"
    has_texts: ClassVar[bool] = False
    is_typed: ClassVar[bool] = False
    name: str
    repeated: frozenset[str] = frozenset()

    @abstractmethod
    def column_names(self) -> list[str]:
        """Names of the columns; those of JSONL are the keys of all lines."""

    @abstractmethod
    def sha256(self) -> str:
        """Digest of the content; of a data set, of the columns that are selected."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    def number(self, index: int) -> int:
        """The number of a row's line in the file, from 1 on; of the row, from 0 on, where it has no
        line."""
        return index

    def select(self, columns: Sequence[str]) -> Table:
        """The table with these columns at least.

        Raises:
            DataError: they take too much memory.
        """
        return self

    @abstractmethod
    def cells(self, index: int) -> Mapping[str, Any]:
        """The cells of a row, None where there is no value.

        Raises:
            DataError: it is not a row. A single cell that cannot be read raises `CellError` when
                it is used.
        """

    def text(self, index: int) -> str | None:
        """The text of a row in the file; None where rows are no text."""
        return None

    def arrow(self, column: str) -> Any:
        """A column as an Arrow array, where the table has its type; else None."""
        return None


class LineTable(Table):
    """A file of lines, with the positions of its rows: the cells of millions of short lines would
    take many times the bytes of the file."""

    unit = "line"

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self._data = name, data
        self._numbers, self._starts, self._stops = array("Q"), array("Q"), array("Q")

    def _add_row(self, number: int, start: int, stop: int) -> None:
        """Adds the row between two positions, which begins on line `number`."""
        self._numbers.append(number)
        self._starts.append(start)
        self._stops.append(stop)
        check_row_count(self.name, len(self._numbers))

    def sha256(self) -> str:
        return hashlib.sha256(self._data).hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, index: int) -> int:
        return self._numbers[index]


class JsonLines(LineTable):
    """One JSON object per line; blank lines do not count."""

    def __init__(self, name: str, data: bytes) -> None:
        super().__init__(name, data)
        number, start = 1, len(BOM) if data.startswith(BOM) else 0
        for content in CONTENT.finditer(data, start):
            number += data.count(b"\n", start, content.start())
            start = max(start, data.rfind(b"\n", start, content.start()) + 1)
            self._add_row(number, start, content.end())
            start = content.end()

    def column_names(self) -> list[str]:
        """The keys of all lines, in the order in which they appear."""
        return list(self._keys)

    @cached_property
    def _keys(self) -> dict[str, None]:
        return dict.fromkeys(key for cells in self._readable() for key in cells)

    def _readable(self) -> Iterator[dict[str, Any]]:
        """The cells of the lines that can be read."""
        for index in range(len(self)):
            with contextlib.suppress(JaxLLMError):
                yield self.cells(index)

    def unread(self) -> str:
        """The error of the first line that cannot be read, as the end of a message."""
        for index in range(len(self)):
            try:
                self.cells(index)
            except JaxLLMError as error:
                return f"; not every line can be read: {shortened(str(error))}"
        return ""

    def first_keys(self) -> list[str]:
        """The keys of the first line that is an object; none if no line is."""
        return list(next(self._readable(), ()))

    def text(self, index: int) -> str:
        line = self._data[self._starts[index] : self._stops[index]]
        return line[:MAX_ROW_BYTES].decode("utf-8", "backslashreplace")

    def cells(self, index: int) -> dict[str, Any]:
        number, start, stop = self.number(index), self._starts[index], self._stops[index]
        if stop - start > MAX_ROW_BYTES:
            raise DataError(
                f"line {number}: has {stop - start} bytes, and a row at most {MAX_ROW_BYTES}"
            )
        raw = parse_json(self._data[start:stop], source=f"line {number}", error=DataError)
        if not isinstance(raw, dict):
            raise DataError(f"line {number}: is {type(raw).__name__}, not an object")
        return raw


class CsvTable(LineTable):
    """A CSV file with a header. The second column of a name gets a number, as in pandas.

    Args:
        kind, delimiter: as `csv_delimiter`.
    """

    has_texts = True

    def __init__(self, name: str, data: bytes, kind: str, delimiter: str | None = None) -> None:
        super().__init__(name, data)

        def lines() -> Iterator[bytes]:
            return (match.group() for match in _LINE.finditer(data))

        self._delimiter = csv_delimiter(name, kind, delimiter, lines())
        rows = csv_rows(name, lines(), self._delimiter, max_lines=_MAX_LINES)
        *_, header = next(rows)
        for number, start, stop, _ in rows:
            self._add_row(number, start, stop)
        self._columns = with_distinct_names(header)
        self.repeated = frozenset(column for column in header if header.count(column) > 1)

    def column_names(self) -> list[str]:
        return self._columns

    def text(self, index: int) -> str:
        return self._data[self._starts[index] : self._stops[index]].decode("utf-8")

    def cells(self, index: int) -> dict[str, Any]:
        text = io.StringIO(self.text(index), newline="")
        cells = next(csv.reader(text, delimiter=self._delimiter))
        if len(cells) != len(self._columns):
            raise DataError(
                f"line {self.number(index)}: has {len(cells)} cells, but the header "
                f"{len(self._columns)}"
            )
        return dict(zip(self._columns, cells, strict=True))


def csv_delimiter(name: str, kind: str, given: str | None, lines: Iterable[bytes]) -> str:
    """The character between the cells of a CSV or TSV file.

    Args:
        kind: "CSV" or "TSV".
        given: the delimiter of CSV files; None: a comma.
        lines: the file from its first line on.

    Raises:
        DataError: no delimiter is given, and the header has semicolons or tabs and no comma.
    """
    if kind == "TSV" or given is not None:
        return "\t" if kind == "TSV" else given or ","
    header = [line[:_HEADER_BYTES].decode("utf-8-sig", "replace") for line in islice(lines, 100)]
    counts = dict.fromkeys(",;\t", 1)
    for mark in counts:
        with contextlib.suppress(csv.Error):  # which `csv_rows` reports
            counts[mark] = len(next(filter(None, csv.reader(header, delimiter=mark)), ()))
    for mark in ";\t":
        if counts[mark] > 1 >= counts[","]:
            raise DataError(
                f"{name}: the first line has {mark!r} and no comma between its cells; name the "
                f"delimiter with --delimiter (delimiter= in Python): {mark!r}, or ',' for a file "
                "of one column"
            )
    return ","


def checked_delimiter(delimiter: Any) -> str | None:
    """Checks a delimiter that a user gives. A backslash followed by t stands for a tab.

    Raises:
        InputError: it is not one character, or is a quote or a line end.
    """
    if delimiter in (None, "\\t"):
        return delimiter and "\t"
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\r\n':
        raise InputError(f"delimiter: expected one character, such as ';', found {delimiter!r:.40}")
    return delimiter


def csv_rows(
    name: str, lines: Iterable[bytes], delimiter: str, max_lines: int | None = None
) -> Iterator[tuple[int, int, int, list[str]]]:
    """Number of the first line, first and last position, and cells of each row; the header first.

    Args:
        lines: the lines of the file, with their ends.

    Raises:
        DataError: the file is empty, malformed, or has more than `max_lines` lines.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    has_header = False
    number, start, position = 1, 0, 0

    def decoded() -> Iterator[str]:
        nonlocal start, position
        for count, line in enumerate(lines):
            position += len(line)
            if count == 0 and line.startswith(BOM):
                line, start = line[len(BOM) :], len(BOM)
            if position - start > MAX_ROW_BYTES:
                raise DataError(
                    f"{name}: line {number}: a row of more than {MAX_ROW_BYTES} bytes; "
                    "perhaps a quote is not closed"
                )
            if max_lines is not None and count >= max_lines:
                raise DataError(f"{name}: has more than {max_lines} lines; split it")
            yield line.decode("utf-8")

    reader = csv.reader(decoded(), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            if cells:
                has_header = True
                yield number, start, position, cells
            number, start = reader.line_num + 1, position
    except UnicodeDecodeError:
        raise DataError(f"{name}: line {number}: not UTF-8; save it as UTF-8") from None
    except csv.Error as failure:
        raise DataError(
            f"{name}: line {number}: {failure}; a cell with quotes needs them doubled"
        ) from None
    if not has_header:
        raise DataError(f"{name}: is empty; the first line names the columns")


class ArrowTable(Table):
    """A table in memory.

    Args:
        table: a `pyarrow.Table`.
    """

    is_typed = True

    def __init__(self, name: str, table: Any, digest: str = "") -> None:
        check_distinct(name, table.column_names)
        self.name, self._table, self._digest = name, table, digest

    def column_names(self) -> list[str]:
        return self._table.column_names

    def sha256(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return self._table.num_rows

    def cells(self, index: int) -> Mapping[str, Any]:
        columns = zip(self._table.column_names, self._columns, strict=True)
        return Cells({name: column[index] for name, column in columns})

    @cached_property
    def _columns(self) -> list[Any]:
        return self._table.columns  # which pyarrow makes anew in each access

    def arrow(self, column: str) -> Any:
        return self._table.column(column)


class ParquetTable(Table):
    """A Parquet file."""

    is_typed = True

    def __init__(self, name: str, data: bytes) -> None:
        parquet = require("pyarrow.parquet", extra="parquet", purpose="Parquet files")
        self.name, self._data = name, data
        with self._naming_failure():
            self._file = parquet.ParquetFile(io.BytesIO(data))
        check_distinct(name, self.column_names())

    def column_names(self) -> list[str]:
        return self._file.schema_arrow.names

    def sha256(self) -> str:
        return hashlib.sha256(self._data).hexdigest()

    def __len__(self) -> int:
        return self._file.metadata.num_rows

    def select(self, columns: Sequence[str]) -> Table:
        with self._naming_failure():
            table = _read_within_limits(self.name, self._file, columns)
        return ArrowTable(self.name, table, self.sha256())

    @cached_property
    def _whole(self) -> Table:
        return self.select(self.column_names())

    def cells(self, index: int) -> Mapping[str, Any]:
        return self._whole.cells(index)

    @contextlib.contextmanager
    def _naming_failure(self) -> Generator[None, None, None]:
        try:
            yield
        except DataError:
            raise
        except (ValueError, OSError) as failure:  # pyarrow's errors
            reason = shortened(str(failure))
            raise DataError(f"{self.name}: cannot be read as Parquet ({reason})") from None


class DatasetTable(Table):
    """A Hugging Face data set.

    Args:
        dataset: a `datasets.Dataset`.
    """

    is_typed = True

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self._dataset = name, dataset

    def column_names(self) -> list[str]:
        return self._dataset.column_names

    def sha256(self) -> str:
        return digest_of_rows(map(self.cells, range(len(self))))

    def __len__(self) -> int:
        return len(self._dataset)

    def select(self, columns: Sequence[str]) -> Table:
        return DatasetTable(self.name, self._dataset.select_columns(list(columns)))

    @cached_property
    def _cells(self) -> Callable[[int], Cells]:
        return dataset_cells(self._dataset)

    def cells(self, index: int) -> Mapping[str, Any]:
        return self._cells(index)

    def arrow(self, column: str) -> Any:
        return self._dataset.with_format("arrow")[:].column(column)


def dataset_cells(dataset: Any) -> Callable[[int], Cells]:
    """A function that gives the cells of a row of a `datasets.Dataset`.

    The cells are Arrow scalars, as in a Parquet file. Only in columns of types that Arrow lacks,
    such as `Json`, the cells are the values that `datasets` decodes.
    """
    features = require("datasets.features.features", extra="datasets", purpose="data sets")
    kinds = dataset.features.items()
    decoded = [name for name, kind in kinds if features.require_decoding(kind)]
    stored, own = dataset.with_format("arrow"), dataset.select_columns(decoded)

    def cells(index: int) -> Cells:
        row = stored[index]
        raw = {name: row.column(name)[0] for name in row.column_names}
        return Cells(raw | own[index] if decoded else raw)

    return cells


def digest_of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Hash of rows as JSON lines; values that JSON lacks, such as dates, as their `str`."""
    digest = hashlib.sha256()
    for row in rows:
        values = row
        if isinstance(row, Cells):
            values = {name: row.shown(name) for name in row}
        digest.update(json.dumps(values, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


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


def check_distinct(name: str, columns: Sequence[str]) -> None:
    """Raises DataError if two columns of a table have the same name."""
    if len(set(columns)) < len(columns):
        twice = next(each for each in columns if columns.count(each) > 1)
        raise DataError(f"{name}: the column {twice!r} is there twice; rename one")


def with_distinct_names(columns: Sequence[str]) -> list[str]:
    """Names of columns, of which those that are repeated get a number, as in pandas.

    >>> with_distinct_names(["a", "b", "a", "a", "a.1"])
    ['a', 'b', 'a.2', 'a.3', 'a.1']
    """
    names: dict[str, None] = {}
    for column in columns:
        numbered = (f"{column}.{count}" for count in itertools.count(1))
        others = (name for name in numbered if name not in names and name not in columns)
        names[next(others) if column in names else column] = None
    return list(names)
