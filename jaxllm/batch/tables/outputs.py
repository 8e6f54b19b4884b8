"""Output files of a job: JSONL, CSV or Parquet, as the name says."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from jaxllm.common.cells import cell_text, printable
from jaxllm.common.errors import UnsupportedError
from jaxllm.common.optional_packages import require

Line: TypeAlias = Mapping[str, Any]
Writer: TypeAlias = Callable[[BinaryIO, "OutputTable"], None]
_REFUSED = (".arrow", ".feather", ".xlsx", ".xls", ".bz2", ".xz", ".zst", ".zip")


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
    return _gzipped(writer) if compressed else writer


def _gzipped(writer: Writer) -> Writer:
    def write(file: BinaryIO, table: OutputTable) -> None:
        # Without a time, so that a job that is merged again writes the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed:
            writer(compressed, table)  # pyright: ignore[reportArgumentType]

    return write


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

    def column(name: str) -> Any:
        if name in table.arrow:
            return table.arrow[name]
        values = [line.get(name) for line in table.lines()]
        for type_ in result_types(name, several=table.several):
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


def result_types(name: str, *, several: bool) -> list[Any]:
    """Arrow types that a column of results may have, the likeliest first."""
    pyarrow = require("pyarrow", extra="parquet", purpose="Parquet files and data frames")
    text = pyarrow.string()
    types = {"text": text, "output_ids": pyarrow.list_(pyarrow.int64()), "finish_reason": text}
    if name not in types:
        return []
    one, list_ = types[name], pyarrow.list_(types[name])
    return [list_, one] if several else [one, list_]


def _text(value: Any) -> str | None:
    """A value as a text: numbers, lists and objects as JSON, and dates as Python shows them."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | list | Mapping):
        return json.dumps(printable(value), ensure_ascii=False, default=cell_text)
    return cell_text(value)
