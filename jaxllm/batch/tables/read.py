"""Reads inputs: files of the kinds that their names say, data sets, and data frames in memory."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

from jaxllm.batch.tables.columns import ColumnChoice
from jaxllm.batch.tables.source import EXAMPLE, OpenAIRequests, Source
from jaxllm.batch.tables.table import (
    BOM,
    CONTENT,
    MAX_INPUT_BYTES,
    ArrowTable,
    CsvTable,
    DatasetTable,
    JsonLines,
    ParquetTable,
    Table,
    checked_delimiter,
)
from jaxllm.common.errors import (
    DataError,
    InputError,
    MissingFileError,
    naming_file,
    quoted,
    shortened,
)
from jaxllm.common.files import expanded
from jaxllm.common.optional_packages import load_dataset, require

STDIN = "-"
DATASET_PREFIX = "datasets:"
GZIP = b"\x1f\x8b"
_CHUNK = 2**20
KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSONL"),
    ".csv": "CSV",
    ".tsv": "TSV",
    ".parquet": "Parquet",
}
"""Kinds of files by suffix; any other name is JSONL."""
OTHER_FORMATS = {
    **dict.fromkeys((".xlsx", ".xls"), "an Excel sheet"),
    **dict.fromkeys((".arrow", ".feather"), "an Arrow file"),
    **dict.fromkeys((".bz2", ".xz", ".zst", ".zip", ".tar"), "compressed, and not by gzip"),
    **dict.fromkeys((".safetensors", ".gguf", ".bin", ".pt", ".npy", ".npz"), "a file of arrays"),
}
"""Suffixes of files that are not read."""
RESULTS = ("text", "output_ids", "finish_reason")
"""Columns of the result of a row that generates."""
_MAGIC = {
    b"PAR1": "Parquet",
    GZIP: "gzip",
    b"PK\x03\x04": "a zip archive or an Excel sheet",
    b"ARROW1": "an Arrow file",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"GGUF": "GGUF",
    b"\x93NUMPY": "a NumPy array",
}
"""First bytes of files."""


def read_source(
    name: str | PathLike[str],
    choice: ColumnChoice | None = None,
    *,
    dataset_name: str | None = None,
    split: str | None = None,
    delimiter: str | None = None,
    results: Sequence[str] = RESULTS,
    keeps_types: bool = False,
) -> Source:
    """Reads an input of rows.

    Args:
        choice: the keys and columns that are read; None: those of generation.
        results, keeps_types: as `Source`.
        name, dataset_name, split, delimiter: as `read_table`, which also says what is raised.
    """
    choice = choice or ColumnChoice()
    table = read_table(name, dataset_name=dataset_name, split=split, delimiter=delimiter)
    if isinstance(table, JsonLines) and {"custom_id", "body"} <= set(table.first_keys()):
        return OpenAIRequests(table, choice)
    return Source(table, choice, results, keeps_types=keeps_types)


def read_table(
    name: str | PathLike[str],
    *,
    dataset_name: str | None = None,
    split: str | None = None,
    delimiter: str | None = None,
) -> Table:
    """Reads a table.

    Args:
        name: a file (JSONL, an OpenAI batch file, CSV, TSV or Parquet, any of them with .gz), "-"
            (stdin: JSONL, perhaps compressed), "datasets:NAME" for a data set of the Hub, or a
            folder of one.
        dataset_name: configuration of a data set.
        split: of a data set; None: "train".
        delimiter: the character between the cells of a CSV file; None: a comma.

    Raises:
        InputError: an argument is wrong, or has no effect on this kind of input.
        MissingFileError: there is no such file.
        DataError: the content is not what the name says, or cannot be read.
        MissingExtraError: a package is missing.
    """
    name, delimiter = str(name), checked_delimiter(delimiter)
    path = expanded(name)
    is_dataset = name.startswith(DATASET_PREFIX) or path.is_dir()
    kind = "a data set" if is_dataset else "JSONL" if name == STDIN else kind_of(path)
    if delimiter is not None and kind != "CSV":
        raise InputError(f"--delimiter: only for .csv files, and {name} is {kind}; remove it")
    if is_dataset:
        dataset = name.removeprefix(DATASET_PREFIX)
        if not dataset:
            raise InputError(f"--input: {name} names no data set; write {DATASET_PREFIX}NAME")
        split = split or "train"
        loaded = load_dataset(dataset, dataset_name, split, field="--input")
        return DatasetTable(f"{dataset}/{split}", loaded)
    if dataset_name is not None or split is not None:
        raise InputError(f"--split, --dataset-name: {name} is no data set, but a file")
    data = read_content(name)
    name = "stdin" if name == STDIN else name
    check_content(name, data, kind)
    if kind == "Parquet":
        return ParquetTable(name, data)
    if kind in ("CSV", "TSV"):
        return CsvTable(name, data, kind, delimiter)
    return JsonLines(name, data)


def kind_of(path: Path) -> str:
    """The kind of file that a name says."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    other_format = OTHER_FORMATS.get(suffixes[-1]) if suffixes else None
    if other_format is not None:
        raise DataError(
            f"{path}: is {other_format}; write its rows as Parquet, CSV, TSV or JSONL, {EXAMPLE}"
        )
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return KINDS.get(suffixes[-1], "JSONL") if suffixes else "JSONL"


def check_content(name: str, data: bytes, kind: str) -> None:
    """Raises DataError if the content is of another kind than the name says."""
    content = next((label for magic, label in _MAGIC.items() if data.startswith(magic)), None)
    if content is None and b"\0" in data[:4096]:
        content = "binary data"
    first = CONTENT.search(data, len(BOM) if data.startswith(BOM) else 0)
    start = b"" if first is None else data[first.start() : first.start() + 1]
    if content is None and start == b"{" and kind not in ("JSONL", "Parquet"):
        content = "JSONL"
    if content is None and start == b"[" and kind == "JSONL":
        raise DataError(
            f"{name}: is one JSON list; write one object per line, {EXAMPLE} (jq -c '.[]' does it)"
        )
    if data and content != (kind if kind == "Parquet" else None):
        shown = content or "text"
        advice = "save it as a file" if name == "stdin" else "rename it, if that is what it is"
        raise DataError(
            f"{name}: expected {kind}, found {shown}; {advice}, or write JSONL, {EXAMPLE}"
        )


def read_content(name: str) -> bytes:
    """The bytes of a file, or of stdin if it is called "-", decompressed.

    Raises:
        MissingFileError: there is no such file.
        DataError: the file cannot be read, its name does not say whether it is compressed, its gzip
            data is damaged, or there are more than `MAX_INPUT_BYTES`.
    """
    path = expanded(name)
    if name == STDIN:
        return _decompressed("stdin", _limited("stdin: has", sys.stdin.buffer), says_gzip=None)
    try:
        with naming_file(path, DataError, "read"), path.open("rb") as file:
            data = _limited(f"{path}: has", file)
    except DataError as failure:
        if isinstance(failure.__cause__, FileNotFoundError):
            raise MissingFileError(
                f"{path}: no such file (a data set of the Hub is {DATASET_PREFIX}NAME)"
            ) from None
        raise
    return _decompressed(name, data, says_gzip=path.suffix.lower() == ".gz")


def _limited(source: str, file: BinaryIO | gzip.GzipFile) -> bytes:
    """All bytes of a file; it may be a pipe or a device, which has no size.

    Args:
        source: the beginning of the message for too large a file.
    """
    content = io.BytesIO()
    for chunk in _chunks(source, file):
        content.write(chunk)
    return content.getvalue()


def _chunks(source: str, file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    """The bytes of a file in pieces, up to `MAX_INPUT_BYTES`."""
    size = 0
    while chunk := file.read(_CHUNK):
        size += len(chunk)
        if size > MAX_INPUT_BYTES:
            raise DataError(
                f"{source} more than {MAX_INPUT_BYTES} bytes; split it into several files, a job "
                "for each"
            )
        yield chunk


def _decompressed(name: str, data: bytes, *, says_gzip: bool | None) -> bytes:
    """
    Args:
        says_gzip: whether the name says that the data is compressed; None: the name says nothing.
    """
    if not data.startswith(GZIP):
        if says_gzip and data:
            raise DataError(f"{name}: its name says gzip, but it is not compressed; rename it")
        return data
    if says_gzip is False:
        raise DataError(f"{name}: is compressed by gzip; rename it to {name}.gz")
    try:
        with gzip.open(io.BytesIO(data)) as file:
            # A few kilobytes can become many gigabytes, so they are counted before they are kept.
            for _ in _chunks(f"{name}: decompresses to", file):
                pass
            file.seek(0)
            return _limited(f"{name}: decompresses to", file)
    except (EOFError, OSError, zlib.error) as failure:
        raise DataError(f"{name}: damaged gzip data ({failure}); fetch it again") from None


def table_of_frame(frame: Any) -> tuple[Table, Callable[[Any, Mapping[str, str]], Any]]:
    """A data frame as a table, and the function that makes a data frame of its kind.

    The function takes a `pyarrow.Table`, and the names of the columns of `frame` that some of its
    columns are copies of. These are taken from `frame` itself, so that they keep their types.

    Args:
        frame: a pandas or Polars data frame, or a `pyarrow.Table`. The index of a pandas frame is
            no column; the frame that is made has the same index.

    Raises:
        InputError: it is something else, or Arrow has no type for a column.
        MissingExtraError: pyarrow is missing.
    """
    arrow = require("pyarrow", extra="parquet", purpose="data frames")
    kind, name = type(frame).__module__.partition(".")[0], type(frame).__name__
    if isinstance(frame, arrow.Table):
        return ArrowTable("table", frame), lambda table, copies: table
    if (kind, name) not in (("pandas", "DataFrame"), ("polars", "DataFrame")):
        raise InputError(
            "table: expected a pandas or Polars data frame, a pyarrow.Table or a path, found "
            f"{quoted(type(frame).__name__)}"
        )
    try:
        own = _frame_in_arrow(frame, kind, arrow)
    except arrow.ArrowException as failure:  # a column of several types
        reasons = "; ".join(map(str, reversed(failure.args)))
        raise InputError(
            f"table: {shortened(reasons, 300)}; give it one type, such as astype(str)"
        ) from None

    def to_frame(table: Any, copies: Mapping[str, str]) -> Any:
        if kind == "polars":
            kept = (frame[column].alias(name) for name, column in copies.items())
            return type(frame)(table).with_columns(kept)
        result = table.to_pandas().set_axis(frame.index)
        for name, column in copies.items():
            result[name] = frame.iloc[:, own.column_names.index(column)].array
        return result

    return ArrowTable("table", own), to_frame


def _frame_in_arrow(frame: Any, kind: str, arrow: Any) -> Any:
    """The `pyarrow.Table` of a pandas or Polars data frame."""
    if kind == "polars":
        # Of Python objects, Arrow would get the bytes of pointers.
        if objects := [name for name, dtype in frame.schema.items() if str(dtype) == "Object"]:
            raise InputError(
                f"table: the column {objects[0]!r} holds Python objects, which Polars cannot "
                "convert; drop it, or make texts or numbers of it"
            )
        return frame.to_arrow()
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise InputError(f"table: the column {twice!r} is there twice; rename one")
    # Arrow stores periods as numbers.
    periods = [name for name, dtype in frame.dtypes.items() if str(dtype).startswith("period")]
    return arrow.Table.from_pandas(frame.astype(dict.fromkeys(periods, str)), preserve_index=False)
