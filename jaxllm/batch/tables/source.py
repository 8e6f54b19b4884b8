"""The rows of a job, and the file of its output.

A `Source` gives the rows one by one, from a table or from an OpenAI batch file, and their lines of
the output. These are written as JSONL, CSV or Parquet, as the name of the output says.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from jaxllm.batch.rows import PROMPT_KEYS, BatchOutput, RawRow
from jaxllm.batch.tables.columns import FAILED, ColumnChoice
from jaxllm.batch.tables.table import JsonLines, Table
from jaxllm.common.arguments import is_integer
from jaxllm.common.cells import CellError, cell_text, printable
from jaxllm.common.errors import (
    DataError,
    InputError,
    JaxLLMError,
    UnsupportedError,
    listed,
    quoted,
    shortened,
)
from jaxllm.common.optional_packages import require
from jaxllm.generation.settings.config import FIELDS

EXAMPLE = 'such as {"prompt": "Hello"} on each line'
ERROR_COLUMNS = ("error", "error_kind")
SHOWN_ROWS = 3
"""Rows whose errors are in the message on an input without a prompt."""
Line: TypeAlias = Mapping[str, Any]
Writer: TypeAlias = Callable[[BinaryIO, "OutputTable"], None]
_REFUSED = (".arrow", ".feather", ".xlsx", ".xls", ".bz2", ".xz", ".zst", ".zip")


class Source:
    """Rows of a job, by number from 0 on, and the lines of its output.

    Args:
        table: selects the columns that are read.
        results: the columns of the output that a row without an error has.
        keeps_types: kept columns are copied as Arrow arrays, where the table has them; otherwise
            their cells are read, and a row with an unreadable one is an error.

    Attributes:
        columns: all columns of the output, in their order.

    Raises:
        DataError, InputError: the table does not fit the choice of columns.
    """

    def __init__(
        self,
        table: Table,
        choice: ColumnChoice,
        results: Sequence[str] = (),
        *,
        keeps_types: bool = False,
    ) -> None:
        self.choice, self.name, self.unit = choice, table.name, table.unit
        columns = table.column_names()
        used: list[str] = []
        self._kept: list[str] = []
        try:
            if columns:  # JSONL without a line that can be read has none; see `check_rows`
                used, self._kept = choice.used(columns), choice.kept(columns)
        except DataError as error:
            unread = table.unread() if isinstance(table, JsonLines) else ""
            raise DataError(f"{table.name}: {error}{unread}") from None
        named = {*choice.fields(columns), *choice.template_names}
        if twice := sorted(table.repeated & named):
            raise DataError(f"{table.name}: the column {twice[0]!r} is there twice; rename one")
        own = [*results, *ERROR_COLUMNS]
        names = [choice.keep_prefix + name for name in self._kept]
        if taken := [name for name in names if name in ("id", "row", *own)]:
            raise InputError(
                f"--keep: the output has a column {taken[0]!r} of its own; put a prefix before "
                "the kept columns with keep_prefix (--keep-prefix input_)"
            )
        self.columns = ["id", "row", *names, *own]
        read = {"id", *used, *self._kept}
        self.unread = [name for name in columns if name not in read]
        self._has_ids = "id" in columns
        self.table = table.select([name for name in columns if name in read])
        self.sha256 = self.table.sha256()
        self._read = [] if keeps_types and table.is_typed else self._kept
        """The kept columns whose cells are read."""
        self.copies = {choice.keep_prefix + name: name for name in self._kept}
        """The kept columns, by their names in the output."""

    def __len__(self) -> int:
        return len(self.table)

    def number(self, index: int) -> int:
        """The number of a row's line or row in the file, see `Table.number`."""
        return self.table.number(index)

    @property
    def identity(self) -> dict[str, Any]:
        """The part of a job's identity that is its input."""
        return {"input": self.sha256, "rows": len(self), **self.choice.options}

    def row(self, index: int) -> RawRow:
        """Row number `index`; in its place an error, if it cannot be read."""
        row_id: str | int = self.number(index)
        raw: dict[str, Any] | JaxLLMError
        try:
            cells = self.table.cells(index)
            own = printable(cells.get("id"))
            if is_integer(own) or (isinstance(own, str) and own):
                row_id = own
            raw = self.choice.row(cells, are_texts=self.table.has_texts)
            for name in self._read:
                cells.get(name)
        except CellError as error:
            raw = DataError(f"{error} ({self.name})")
        except JaxLLMError as error:
            raw = error
        return RawRow(index, row_id, raw)

    def row_id(self, index: int) -> str | int:
        """The id of a row, or its number if it has none. Templates are not rendered for it."""
        if self._has_ids:
            with contextlib.suppress(CellError, JaxLLMError):  # the number of a row with an error
                own = printable(self.table.cells(index).get("id"))
                is_empty = own == "" and self.table.has_texts
                if is_integer(own) or (isinstance(own, str) and not is_empty):
                    return own
        return self.number(index)

    def result(self, output: BatchOutput) -> dict[str, Any]:
        """What a row adds to its line of the output; an error names its line in the input."""
        line = output.to_dict()
        if output.error is None:
            return line
        number = self.number(output.index)
        prefix = f"{self.unit} {number}:"
        error = output.error if output.error.startswith(prefix) else f"{prefix} {output.error}"
        return {**line, "error": error}

    def output_line(self, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
        """The line of the output for a row with this result."""
        kept = self.kept(index) if self._kept else {}
        return {"id": result["id"], "row": index, **kept, **result}

    def kept(self, index: int) -> dict[str, Any]:
        """The kept cells of a row that are read; None where there is none."""
        cells = self._cells(index, self._read)
        return {self.choice.keep_prefix + name: cells.get(name) for name in self._read}

    def arrow(self) -> dict[str, Any]:
        """The kept columns that have a type, as Arrow arrays."""
        arrays = {name: self.table.arrow(column) for name, column in self.copies.items()}
        return {name: array for name, array in arrays.items() if array is not None}

    def inputs(self, index: int) -> dict[str, Any]:
        """The cells of a row, as a row of JSONL that means the same; empty if it has no cells."""
        row: dict[str, Any] = {}
        cells = self._cells(index)
        with contextlib.suppress(JaxLLMError):  # such as of an empty prompt
            row = self.choice.row(cells, are_texts=self.table.has_texts)
        fields = self.choice.fields(list(cells))
        typed = {name: row[name] for name in fields if name in row}
        settings = set(fields) & FIELDS.keys() if self.table.has_texts else ()
        return {
            name: typed.get(name, cell)
            for name, cell in cells.items()
            if cell is not None and (cell or name not in settings)
        }

    def _cells(self, index: int, columns: Collection[str] | None = None) -> dict[str, Any]:
        """The cells of a row, or of some columns, that can be read."""
        cells: dict[str, Any] = {}
        with contextlib.suppress(JaxLLMError):  # the row cannot be read
            row = self.table.cells(index)
            for name in row:
                with contextlib.suppress(CellError):
                    if columns is None or name in columns:
                        cells[name] = row[name]
        return cells

    def remarks(self) -> list[str]:
        """Remarks on the input for the user, one per line."""
        settings = sorted(self.choice.template_settings.intersection(self.table.column_names()))
        remarks = {"are not read": self.unread, "are read by templates, not as settings": settings}
        return [
            f"{self.name}: these columns {remark}: {listed(columns)}"
            for remark, columns in remarks.items()
            if columns
        ]

    def check_rows(self) -> None:
        """Checks the rows as a whole; a single wrong row becomes a record with an error.

        Raises:
            DataError: there are none, none of them has a prompt, or two have the same id.
        """
        if not len(self):
            raise DataError(f"{self.name}: has no rows")
        # Ids 2 and "2" are the same id, because every cell of CSV is a text.
        number_of_id: dict[str, int] = {}
        for index in range(len(self)):
            row_id, number = self.row_id(index), self.number(index)
            other_number = number_of_id.setdefault(str(row_id), number)
            if other_number != number:
                raise DataError(
                    f"{self.name}: {self.unit}s {other_number} and {number} have the same id, "
                    f"{quoted(row_id)} (one without an id has its number); give each its own"
                )
        if not any(self.has_prompt(self.row(index)) for index in range(len(self))):
            raise self._no_prompt()

    def has_prompt(self, row: RawRow) -> bool:
        """True if a row has a prompt, right or wrong."""
        return isinstance(row.raw, Mapping) and bool(row.raw.keys() & PROMPT_KEYS)

    def _no_prompt(self) -> DataError:
        rows = [self.row(index).raw for index in range(min(len(self), SHOWN_ROWS))]
        reasons = [shortened(str(raw)) for raw in rows if isinstance(raw, JaxLLMError)]
        shown = "; ".join(reasons) or (
            f"{self.unit} {self.number(0)} has {shortened(', '.join(rows[0]) or 'no keys')}"
        )
        advice = f"write JSONL, {EXAMPLE}, or name the column of the prompts with --prompt-column"
        if self.choice.template is not None:
            advice = "correct --template"
        return DataError(
            f"{self.name}: no {self.unit} has a prompt, messages or input_ids ({shown}); {advice}"
        )


class OpenAIRequests(Source):
    """Lines with `custom_id`, `method`, `url` and `body`; a row's id is its `custom_id`."""

    def __init__(self, table: JsonLines, choice: ColumnChoice) -> None:
        for flag in choice.options:
            raise InputError(
                f"{flag}: {table.name} is an OpenAI batch file, with prompts in `body`"
            )
        self.choice, self.name, self.unit = choice, table.name, table.unit
        self.table, self.sha256 = table, table.sha256()
        self.columns = ["id", "custom_id", "response", "error"]

    def row(self, index: int) -> RawRow:
        try:
            cells = self.table.cells(index)
            # A file of errors of an earlier job has these two keys as well.
            added = ("id", FAILED) if FAILED in cells else ()
            raw: Any = {key: cells[key] for key in cells if key not in added}
        except JaxLLMError as error:
            raw = error
        custom_id = raw.get("custom_id") if isinstance(raw, Mapping) else None
        row_id = custom_id if isinstance(custom_id, str) else self.number(index)
        return RawRow(index, row_id, raw)

    def row_id(self, index: int) -> str | int:
        return self.row(index).row_id

    def has_prompt(self, row: RawRow) -> bool:
        return isinstance(row.raw, Mapping) and "body" in row.raw

    def result(self, output: BatchOutput) -> dict[str, Any]:
        return output.to_dict()

    def output_line(self, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
        return dict(result)

    def arrow(self) -> dict[str, Any]:
        return {}

    def inputs(self, index: int) -> dict[str, Any]:
        raw = self.row(index).raw
        return dict(raw) if isinstance(raw, Mapping) else {}

    def remarks(self) -> list[str]:
        models: dict[str, None] = {}
        for index in range(len(self)):
            body = self.inputs(index).get("body")
            if isinstance(body, Mapping) and isinstance(body.get("model"), str):
                models[body["model"]] = None
        if not models:
            return []
        return [f"{self.name}: its requests name {listed(list(models))}; --model answers them"]


@dataclasses.dataclass(frozen=True)
class OutputTable:
    """What is written: the columns do not depend on the rows."""

    columns: Sequence[str]
    lines: Callable[[], Iterator[Line]]
    """Gives the lines, as often as it is called."""
    arrow: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Columns of the input that keep their type in Parquet, as Arrow arrays."""
    several: bool = False
    """Results are lists, of `num_return_sequences`, unless the lines show that they are not."""


def encoded(line: Line) -> bytes:
    """One line of JSON. Lone surrogates, which UTF-8 cannot encode, are written as escapes, and
    values that JSON lacks, such as dates, as texts."""
    try:
        return (json.dumps(line, ensure_ascii=False, default=cell_text) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(line, default=cell_text) + "\n").encode("ascii")


def has_types(output: Path | None) -> bool:
    """True if columns keep their types in an output of this name: in Parquet."""
    name = "" if output is None else output.name.lower().removesuffix(".gz")
    return name.endswith(".parquet")


def output_writer(output: Path) -> Writer:
    """The function that writes an output of this name.

    Raises:
        UnsupportedError: no kind of output has such a name.
        MissingExtraError: a package is missing.
    """
    suffixes = [suffix.lower() for suffix in output.suffixes]
    compressed = bool(suffixes) and suffixes[-1] == ".gz"
    suffix = (["", *suffixes[:-1]] if compressed else ["", *suffixes])[-1]
    if suffix in _REFUSED:
        raise UnsupportedError(
            f"--output: {suffix} files are not written, but {output} would be one; name it .jsonl, "
            ".csv, .tsv or .parquet, also with .gz"
        )
    if suffix == ".parquet":
        require("pyarrow.parquet", extra="parquet", purpose="Parquet files")
    writers = {
        ".csv": _write_csv,
        ".tsv": partial(_write_csv, delimiter="\t"),
        ".parquet": _write_parquet,
    }
    writer = writers.get(suffix, _write_jsonl)
    return partial(_write_gzip, writer) if compressed else writer


def _write_gzip(writer: Writer, file: BinaryIO, table: OutputTable) -> None:
    # Without a time, so that a job that is merged again writes the same bytes.
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed:
        writer(compressed, table)  # pyright: ignore[reportArgumentType]


def _write_jsonl(file: BinaryIO, table: OutputTable) -> None:
    for line in table.lines():
        file.write(encoded(line))


def _write_csv(file: BinaryIO, table: OutputTable, delimiter: str = ",") -> None:
    text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(table.columns)
    for line in table.lines():
        writer.writerow([_text(line.get(column)) or "" for column in table.columns])
    text.flush()
    text.detach()


def _write_parquet(file: BinaryIO, table: OutputTable) -> None:
    parquet = require("pyarrow.parquet", extra="parquet", purpose="Parquet files")
    parquet.write_table(arrow_table(table), file)


def arrow_table(table: OutputTable) -> Any:
    """An output as a `pyarrow.Table`."""
    pyarrow = require("pyarrow", extra="parquet", purpose="Parquet files and data frames")
    text, ids = pyarrow.string(), pyarrow.list_(pyarrow.int64())
    result_types = {"text": text, "output_ids": ids, "finish_reason": text}

    def column(name: str) -> Any:
        if name in table.arrow:
            return table.arrow[name]
        values = [line.get(name) for line in table.lines()]
        one = result_types.get(name)
        types = [] if one is None else [one, pyarrow.list_(one)]  # the likeliest first
        for type_ in reversed(types) if table.several else types:
            with contextlib.suppress(pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
                return pyarrow.array(values, type_)
        if all(value is None for value in values):
            return pyarrow.array(values, pyarrow.string())
        # Objects would become a struct of all their keys, and Parquet has none without any.
        if not any(isinstance(value, Mapping) for value in values):
            # Refused: values of several types, integers of more than 64 bits.
            with contextlib.suppress(pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
                return pyarrow.array(values)
        return pyarrow.array(map(_text, values), pyarrow.string())

    return pyarrow.table({name: column(name) for name in table.columns})


def _text(value: Any) -> str | None:
    """A value as a text: numbers, lists and objects as JSON, and dates as Python shows them."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | list | Mapping):
        return json.dumps(printable(value), ensure_ascii=False, default=cell_text)
    return cell_text(value)
