"""Sources of rows: JSONL, JSON, tables, text and byte files.

A row is a dict. Rows are read by index, without loading whole files (except JSON). Errors name the
file and the line.
"""

from __future__ import annotations

import bisect
import contextlib
import glob
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence, Sized
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Literal

from jaxllm.batch.tables.columns import RowTemplate
from jaxllm.batch.tables.read import kind_of, read_table
from jaxllm.batch.tables.table import BOM, JsonLines, csv_rows, dataset_cells, digest_of_rows
from jaxllm.common.cells import Cells
from jaxllm.common.errors import DataError, MissingFileError, naming_file
from jaxllm.common.files import expanded, parse_json
from jaxllm.common.optional_packages import load_dataset
from jaxllm.tokenizers.messages import is_arrow_data
from jaxllm.training.data.large_files import (
    ArrowCopy,
    Places,
    are_large,
    csv_blocks,
    delimiter_of,
    file_hash,
    line_blocks,
    read_hash,
    row_places,
    total_bytes,
)

Row = Mapping[str, Any]
FileType = Literal["auto", "jsonl", "json", "table", "text", "bytes"]

_SUFFIXES: Mapping[str, FileType] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    **dict.fromkeys((".csv", ".tsv", ".parquet"), "table"),
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".bin": "bytes",
}


class Rows(ABC):
    """A source of rows by index.

    Attributes:
        name: name of the source, for messages.
        size: bytes of the source; 0 if its rows are in memory anyway.
        templates: templates that make fields of the other fields of each row.
    """

    name: str
    size: int = 0
    templates: Mapping[str, RowTemplate] = {}

    def __getitem__(self, index: int, /) -> Row:
        row = self.read(index)
        try:
            made = {name: each.render(row) for name, each in self.templates.items()}
        except DataError as failure:
            raise DataError(f"{self.where(index)}: {failure}") from None
        return Cells({**row.raw, **made}) if isinstance(row, Cells) else {**row, **made}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Row:
        """The row as it is in the source."""

    @abstractmethod
    def where(self, index: int) -> str:
        """File and line of a row, for messages: ``train.jsonl:17``."""

    @abstractmethod
    def sha256(self) -> str:
        """A hash of the whole source."""

    @abstractmethod
    def digest(self) -> str:
        """A hash of the whole source that large files have in their indexes."""


def open_rows(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    file_type: FileType = "auto",
    by_line: bool = False,
    delimiter: str | None = None,
) -> Rows:
    """Opens one or more files.

    Args:
        path: a file, a glob (``data/*.jsonl``, sorted by name) or a list of them.
        file_type: ``auto`` decides by the suffix. Rows of text and byte files have one field,
            ``text``, a ``str`` or ``bytes``.
        by_line: each non-blank line of a text file is a row; otherwise the whole file is.
        delimiter: the character between the cells of a CSV file; None: a comma.

    Raises:
        MissingFileError: a file does not exist.
        DataError: a file is malformed or its type is unknown, or `delimiter` has no effect.
    """
    files = find_files(path)
    if delimiter is not None and not any(kind_of(file) == "CSV" for file in files):
        raise DataError(f"delimiter: only for .csv files, and {files[0]} is none; remove it")
    types = {file_type if file_type != "auto" else _type_of(file) for file in files}
    if len(types) > 1:
        raise DataError(f"path: expected files of one type, found {', '.join(sorted(types))}")
    match types.pop():
        case "jsonl":
            return JsonlRows(files)
        case "json":
            return JsonRows(files)
        case "table":
            names = {file.suffix.lower() for file in files}
            is_large = are_large(files) and names <= {".csv", ".tsv"}
            return (CsvRows if is_large else TableRows)(files, delimiter)
        case "text":
            return LineRows(files) if by_line else WholeRows(files, is_text=True)
        case _:
            return WholeRows(files, is_text=False)


def find_files(path: str | PathLike[str] | Sequence[str | PathLike[str]]) -> tuple[Path, ...]:
    """Resolves a path, a glob or a list of them to files; a file named twice is an error."""
    paths = [path] if isinstance(path, str | PathLike) else list(path)
    if not paths:
        raise DataError("path: the list of files is empty")
    files: list[Path] = []
    for item in paths:
        name = expanded(item)
        with naming_file(name, DataError, "read"):
            if name.is_file():
                matches = [name]
            elif name.is_dir():
                raise DataError(f"{name}: a folder; name its files, for example '{name}/*.jsonl'")
            else:
                matches = [Path(f) for f in sorted(glob.glob(str(name), recursive=True))]
                matches = [file for file in matches if file.is_file()]
        if not matches:
            raise MissingFileError(f"{name}: no such file")
        files += matches
    seen: set[Path] = set()
    for file in files:
        real = file.resolve()
        if real in seen:
            raise DataError(f"path: {file} is named twice")
        seen.add(real)
    return tuple(files)


def _type_of(file: Path) -> FileType:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    is_compressed = suffixes[-1:] == [".gz"]
    kind = _SUFFIXES.get((suffixes[:-1] if is_compressed else suffixes or [""])[-1])
    if kind is None or (is_compressed and kind != "table"):
        raise DataError(
            f"{file}: the suffix does not tell the type of file ({', '.join(_SUFFIXES)} do, and "
            "tables also with .gz); set file_type"
        )
    return kind


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as failure:
        raise DataError(f"{file}: cannot be read ({failure.strerror})") from failure


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise DataError(
            f"{where}: not UTF-8 (byte {failure.start}); file_type 'bytes' reads any file"
        ) from failure


def hash_files(files: Sequence[Path]) -> str:
    """Hash of a file, or of the hashes of several."""
    text = "\n".join(map(file_hash, files))
    return text if len(files) == 1 else hashlib.sha256(text.encode()).hexdigest()


class FileRows(Rows):
    """The rows of some files; `parts` are the rows of each, or what they are read from."""

    def __init__(self, files: Sequence[Path], parts: Sequence[Sized]) -> None:
        self.files = files
        first, *others = files
        self.name = f"{first} and {len(others)} more" if others else str(first)
        self.size = total_bytes(files)
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def find(self, index: int) -> tuple[int, int]:
        """Number of the file of a row, and number of the row within it."""
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)

    def sha256(self) -> str:
        return read_hash(self.files)

    def digest(self) -> str:
        return hash_files(self.files)


class _Lines(FileRows):
    """Rows that begin at a line. Only their places are kept: 16 bytes per row."""

    def __init__(
        self,
        files: Sequence[Path],
        find_places: Callable[[Path], Iterator[Places]] = line_blocks,
        index: str = "rows",
    ) -> None:
        keep = are_large(files)
        self._places = [row_places(file, find_places, index, keep=keep) for file in files]
        super().__init__(files, self._places)

    def where(self, index: int) -> str:
        file, position = self.find(index)
        return f"{self.files[file]}:{self._places[file][position, 1]}"

    @contextlib.contextmanager
    def at_row(self, index: int) -> Generator[BinaryIO]:
        """The file of a row, from its first line on."""
        file, position = self.find(index)
        with self.files[file].open("rb") as stream:
            stream.seek(int(self._places[file][position, 0]))
            yield stream

    def line(self, index: int) -> bytes:
        with self.at_row(index) as stream:
            return stream.readline()


class JsonlRows(_Lines):
    """JSONL: one JSON object per line; blank lines are skipped, but counted in line numbers."""

    def read(self, index: int) -> Row:
        where = self.where(index)
        return as_row(parse_json(self.line(index), source=where, error=DataError), where)


class LineRows(_Lines):
    """Text files; each non-blank line is a row."""

    def read(self, index: int) -> Row:
        return {"text": _decode(self.line(index).rstrip(b"\r\n"), self.where(index))}


class WholeRows(FileRows):
    """Text files, or binary ones; each file is a row."""

    def __init__(self, files: Sequence[Path], *, is_text: bool) -> None:
        super().__init__(files, [range(1)] * len(files))
        self._is_text = is_text

    def read(self, index: int) -> Row:
        data = _read(self.files[index])
        is_text = self._is_text
        return {"text": _decode(data.removeprefix(BOM), self.where(index)) if is_text else data}

    def where(self, index: int) -> str:
        return str(self.files[index])


class JsonRows(FileRows):
    """JSON files with a list of objects, loaded in full."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._lists: list[list[Any]] = []
        for file in files:
            values = parse_json(_read(file).removeprefix(BOM), source=str(file), error=DataError)
            if not isinstance(values, list):
                raise DataError(
                    f"{file}: holds {_kind(values)}, not a list of objects; a file of one object "
                    "a line is file_type 'jsonl'"
                )
            for number, value in enumerate(values):
                as_row(value, f"{file}[{number}]")
            self._lists.append(values)
        super().__init__(files, self._lists)

    def read(self, index: int) -> Row:
        file, position = self.find(index)
        return self._lists[file][position]

    def where(self, index: int) -> str:
        file, position = self.find(index)
        return f"{self.files[file]}[{position}]"


def as_row(value: Any, where: str) -> Row:
    """Checks that a value is a row: an object."""
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: expected an object, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "null" if value is None else type(value).__name__)


class CsvRows(_Lines):
    """Large CSV or TSV files. The cells are texts."""

    def __init__(self, files: Sequence[Path], delimiter: str | None = None) -> None:
        self._delimiters = {file: delimiter_of(file, delimiter) for file in files}
        index = "rows" if delimiter is None else f"rows-by-{ord(delimiter)}"
        super().__init__(files, partial(csv_blocks, delimiter=delimiter), index)
        self._headers: list[list[str]] = []
        for file in files:
            with file.open("rb") as stream:
                self._headers.append(self._first_row(file, stream))

    def read(self, index: int) -> Row:
        file, _ = self.find(index)
        with self.at_row(index) as stream:
            cells = self._first_row(self.files[file], stream)
        return dict(zip(self._headers[file], cells, strict=True))

    def _first_row(self, file: Path, stream: BinaryIO) -> list[str]:
        *_, cells = next(csv_rows(str(file), stream, self._delimiters[file]))
        return cells


class TableRows(FileRows):
    """CSV, TSV or Parquet files. The cells of CSV are texts."""

    def __init__(self, files: Sequence[Path], delimiter: str | None = None) -> None:
        large = are_large(files) and files[0].suffix.lower() == ".parquet"
        given = {file: delimiter if kind_of(file) == "CSV" else None for file in files}
        self._tables = [
            ArrowCopy(file) if large else read_table(file, delimiter=given[file]) for file in files
        ]
        for table in self._tables:
            if isinstance(table, JsonLines):
                raise DataError(f"{table.name}: file_type 'table' reads CSV, TSV and Parquet files")
        super().__init__(files, self._tables)

    def read(self, index: int) -> Row:
        file, position = self.find(index)
        table = self._tables[file]
        try:
            return table.cells(position)
        except DataError as failure:
            text = str(failure).removeprefix(f"{table.unit} {table.number(position)}: ")
            raise DataError(f"{self.where(index)}: {text}") from None

    def check_distinct(self, columns: Collection[str | None]) -> None:
        """Raises DataError if several columns have one of these names."""
        for table in self._tables:
            if twice := sorted(table.repeated.intersection(columns)):
                raise DataError(f"{table.name}: the column {twice[0]!r} is there twice; rename one")

    def where(self, index: int) -> str:
        file, position = self.find(index)
        table = self._tables[file]
        number = table.number(position)
        return f"{table.name}:{number}" if table.unit == "line" else f"{table.name}[{number}]"


class SequenceRows(Rows):
    """Rows of a sequence of dicts, such as a list or a ``datasets.Dataset``."""

    def __init__(self, rows: Sequence[Row], name: str = "rows") -> None:
        self._rows, self.name = rows, name
        self.size = getattr(getattr(rows, "data", None), "nbytes", 0)
        # A data set with a format of its user's gives what that format makes of a row.
        is_plain = hasattr(rows, "with_format") and getattr(rows, "format", {}).get("type") is None
        self._cells = dataset_cells(rows) if is_plain else None

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Row:
        if self._cells is not None:
            return self._cells(index)
        row = as_row(self._rows[index], self.where(index))
        return Cells(row, drops_nulls=is_arrow_data(self._rows))

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    @cached_property
    def _sha256(self) -> str:
        return digest_of_rows(
            self._rows if self._cells is None else map(self.read, range(len(self)))
        )

    def sha256(self) -> str:
        """Hash of the rows as JSON lines; values that JSON lacks (dates) as their ``str``."""
        return self._sha256

    def digest(self) -> str:
        """Hash of the Arrow files of a ``datasets.Dataset``; of the rows of another sequence."""
        files = [Path(file["filename"]) for file in getattr(self._rows, "cache_files", ())]
        if not files:
            return self._sha256
        return hashlib.sha256(f"{len(self)}\n{hash_files(files)}".encode()).hexdigest()


def dataset_rows(dataset: str, name: str | None = None, split: str = "train") -> SequenceRows:
    """Rows of a Hugging Face data set; arguments and errors are those of `load_dataset`."""
    return SequenceRows(load_dataset(dataset, name, split), f"{dataset}/{split}")
