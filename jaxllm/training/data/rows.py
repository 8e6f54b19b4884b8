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
import json
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from jaxllm.batch.tables.json_lines import JsonLines
from jaxllm.batch.tables.read import read_table
from jaxllm.batch.tables.table import Table, csv_rows
from jaxllm.batch.tables.templates import RowTemplate
from jaxllm.common.errors import DataError, MissingFileError, naming_file
from jaxllm.common.files import expanded
from jaxllm.common.optional_packages import load_dataset
from jaxllm.common.strict_json import parse_json
from jaxllm.training.data.large_files import (
    ArrowCopy,
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

_BOM = b"\xef\xbb\xbf"
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


class Rows(Protocol):
    """A source of rows by index."""

    @property
    def name(self) -> str:
        """Name of the source, for messages."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...

    def where(self, index: int) -> str:
        """File and line of a row, for messages: ``train.jsonl:17``."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the source; 0 if its rows are in memory anyway."""
        ...

    def sha256(self) -> str:
        """A hash of the whole source."""
        ...

    def digest(self) -> str:
        """A hash of the whole source that large files have in their indexes."""
        ...


def open_rows(
    path: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    file_type: FileType = "auto",
    by_line: bool = False,
) -> Rows:
    """Opens one or more files.

    Args:
        path: a file, a glob (``data/*.jsonl``, sorted by name) or a list of them.
        file_type: ``auto`` decides by the suffix. Rows of text and byte files have one field,
            ``text``, a ``str`` or ``bytes``.
        by_line: each non-blank line of a text file is a row; otherwise the whole file is.

    Raises:
        MissingFileError: a file does not exist.
        DataError: a file is malformed or its type is unknown.
    """
    files = find_files(path)
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
            return CsvRows(files) if is_large else TableRows(files)
        case "text":
            return LineRows(files) if by_line else TextRows(files)
        case _:
            return ByteRows(files)


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


class _Files:
    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)

    @property
    def name(self) -> str:
        first, *others = self.files
        return f"{first} and {len(others)} more" if others else str(first)

    @property
    def size(self) -> int:
        return total_bytes(self.files)

    def sha256(self) -> str:
        return read_hash(self.files)

    def digest(self) -> str:
        """Hash of the file, or of the hashes of several."""
        return hash_files(self.files)


def hash_files(files: Sequence[Path]) -> str:
    """Hash of a file, or of the hashes of several."""
    text = "\n".join(map(file_hash, files))
    return text if len(files) == 1 else hashlib.sha256(text.encode()).hexdigest()


class _Lines(_Files):
    """Rows that begin at a line. Only their places are kept: 16 bytes per row."""

    find_places = staticmethod(line_blocks)

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        keep = are_large(self.files)
        self._places = [row_places(file, self.find_places, keep=keep) for file in self.files]
        self._ends = list(itertools.accumulate(map(len, self._places)))

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, index: int) -> str:
        file, position = find_part(self._ends, index)
        return f"{self.files[file]}:{self._places[file][position, 1]}"

    @contextlib.contextmanager
    def at_row(self, index: int) -> Generator[BinaryIO]:
        """The file of a row, from its first line on."""
        file, position = find_part(self._ends, index)
        with self.files[file].open("rb") as stream:
            stream.seek(int(self._places[file][position, 0]))
            yield stream

    def line(self, index: int) -> bytes:
        with self.at_row(index) as stream:
            return stream.readline()


def find_part(ends: Sequence[int], index: int) -> tuple[int, int]:
    """The part that an index falls into, and the index within it; `ends` are sums of lengths.

    >>> find_part([3, 3, 5], 3)
    (2, 0)
    """
    part = bisect.bisect_right(ends, index)
    return part, index - (ends[part - 1] if part else 0)


class JsonlRows(_Lines):
    """JSONL: one JSON object per line; blank lines are skipped, but counted in line numbers."""

    def __getitem__(self, index: int, /) -> Row:
        where = self.where(index)
        return as_row(parse_json(self.line(index), source=where, error=DataError), where)


class LineRows(_Lines):
    """Text files; each non-blank line is a row."""

    def __getitem__(self, index: int, /) -> Row:
        return {"text": _decode(self.line(index).rstrip(b"\r\n"), self.where(index))}


class TextRows(_Files):
    """Text files; each file is a row."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> Row:
        data = _read(self.files[index]).removeprefix(_BOM)
        return {"text": _decode(data, self.where(index))}

    def where(self, index: int) -> str:
        return str(self.files[index])


class ByteRows(TextRows):
    """Binary files; each file is a row."""

    def __getitem__(self, index: int, /) -> Row:
        return {"text": _read(self.files[index])}


class JsonRows(_Files):
    """JSON files with a list of objects, loaded in full."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        self._rows: list[tuple[Row, str]] = []
        for file in self.files:
            data = _read(file).removeprefix(_BOM)
            values = parse_json(data, source=str(file), error=DataError)
            if not isinstance(values, list):
                raise DataError(
                    f"{file}: holds {_kind(values)}, not a list of objects; a file of one object "
                    "a line is file_type 'jsonl'"
                )
            for number, value in enumerate(values):
                where = f"{file}[{number}]"
                self._rows.append((as_row(value, where), where))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        return self._rows[index][0]

    def where(self, index: int) -> str:
        return self._rows[index][1]


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

    find_places = staticmethod(csv_blocks)

    def __getitem__(self, index: int, /) -> Row:
        file = self.files[find_part(self._ends, index)[0]]
        with self.at_row(index) as stream:
            *_, cells = next(csv_rows(str(file), stream, delimiter_of(file)))
        return dict(zip(self._headers[file], cells, strict=True))

    @cached_property
    def _headers(self) -> dict[Path, list[str]]:
        headers: dict[Path, list[str]] = {}
        for file in self.files:
            with file.open("rb") as stream:
                *_, headers[file] = next(csv_rows(str(file), stream, delimiter_of(file)))
        return headers


class TableRows(_Files):
    """CSV, TSV or Parquet files. The cells of CSV are texts."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)
        large = are_large(self.files) and self.files[0].suffix.lower() == ".parquet"
        self._tables = [(ArrowCopy if large else read_table)(file) for file in self.files]
        for table in self._tables:
            if isinstance(table, JsonLines):
                raise DataError(f"{table.name}: file_type 'table' reads CSV, TSV and Parquet files")
        self._ends = list(itertools.accumulate(map(len, self._tables)))

    def __len__(self) -> int:
        return self._ends[-1]

    def _find(self, index: int) -> tuple[Table, int]:
        number, position = find_part(self._ends, index)
        return self._tables[number], position

    def __getitem__(self, index: int, /) -> Row:
        table, position = self._find(index)
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
        table, position = self._find(index)
        number = table.number(position)
        return f"{table.name}:{number}" if table.unit == "line" else f"{table.name}[{number}]"


class TemplatedRows:
    """Rows with fields that templates make of their other fields."""

    def __init__(self, rows: Rows, templates: Mapping[str, RowTemplate]) -> None:
        self._rows, self._templates = rows, templates
        self.name = rows.name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        row = self._rows[index]
        try:
            return {**row, **{name: each.render(row) for name, each in self._templates.items()}}
        except DataError as failure:
            raise DataError(f"{self.where(index)}: {failure}") from None

    def where(self, index: int) -> str:
        return self._rows.where(index)

    @property
    def size(self) -> int:
        return self._rows.size

    def sha256(self) -> str:
        return self._rows.sha256()

    def digest(self) -> str:
        return self._rows.digest()


class SequenceRows:
    """Rows of a sequence of dicts, such as a list or a ``datasets.Dataset``."""

    def __init__(self, rows: Sequence[Row], name: str = "rows") -> None:
        self._rows = rows
        self.name = name

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int, /) -> Row:
        return as_row(self._rows[index], self.where(index))

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    @property
    def size(self) -> int:
        return getattr(getattr(self._rows, "data", None), "nbytes", 0)

    @cached_property
    def _digest(self) -> str:
        return hash_rows(self._rows[index] for index in range(len(self)))

    def sha256(self) -> str:
        """Hash of the rows as JSON lines; values that JSON lacks (dates) as their ``str``."""
        return self._digest

    def digest(self) -> str:
        """Hash of the Arrow files of a ``datasets.Dataset``; of the rows of another sequence."""
        files = [Path(file["filename"]) for file in getattr(self._rows, "cache_files", ())]
        if not files:
            return self._digest
        return hashlib.sha256(f"{len(self)}\n{hash_files(files)}".encode()).hexdigest()


def hash_rows(rows: Iterable[Row]) -> str:
    """SHA-256 of the rows as lines of JSON."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def dataset_rows(dataset: str, name: str | None = None, split: str = "train") -> SequenceRows:
    """Rows of a Hugging Face data set; arguments and errors are those of `load_dataset`."""
    return SequenceRows(load_dataset(dataset, name, split), f"{dataset}/{split}")
