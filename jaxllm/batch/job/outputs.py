"""Output files of a job: JSONL, CSV or Parquet, as the name says."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from jaxllm.common.errors import UnsupportedError
from jaxllm.common.optional_packages import require

Line: TypeAlias = Mapping[str, Any]
Lines: TypeAlias = Callable[[], Iterator[Line]]
"""Gives the lines of an output, as often as it is called."""
Writer: TypeAlias = Callable[[BinaryIO, Lines], None]
_REFUSED = (".arrow", ".feather", ".xlsx", ".xls", ".bz2", ".xz", ".zst", ".zip")


def encoded(line: Line) -> bytes:
    """One line of JSON. Lone surrogates, which UTF-8 cannot encode, are written as escapes."""
    try:
        return (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(line) + "\n").encode("ascii")


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
            f"--output: {output} would be of a kind that is not written; name it .jsonl, .csv or "
            ".parquet (.jsonl and .csv also with .gz)"
        )
    if suffix == ".parquet":
        require("pyarrow.parquet", extra="parquet", purpose="Parquet files")
    writer = {".csv": _write_csv, ".tsv": _write_tsv, ".parquet": _write_parquet}.get(
        suffix, _write_jsonl
    )
    return _gzipped(writer) if compressed else writer


def _gzipped(writer: Writer) -> Writer:
    def write(file: BinaryIO, lines: Lines) -> None:
        # Without a time, so that a job that is merged again writes the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as compressed:
            writer(compressed, lines)  # pyright: ignore[reportArgumentType]

    return write


def _write_jsonl(file: BinaryIO, lines: Lines) -> None:
    for line in lines():
        file.write(encoded(line))


def _write_csv(file: BinaryIO, lines: Lines, delimiter: str = ",") -> None:
    text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    columns = _columns(lines)
    writer.writerow(columns)
    for line in lines():
        writer.writerow([_cell(line.get(column)) for column in columns])
    text.flush()
    text.detach()


def _write_tsv(file: BinaryIO, lines: Lines) -> None:
    _write_csv(file, lines, "\t")


def _write_parquet(file: BinaryIO, lines: Lines) -> None:
    pyarrow = require("pyarrow", extra="parquet", purpose="Parquet files")
    parquet = require("pyarrow.parquet", extra="parquet", purpose="Parquet files")

    def column(name: str) -> Any:
        values = [line.get(name) for line in lines()]
        # Objects would become a struct of all their keys, and Parquet has none without any.
        if not any(isinstance(value, Mapping) for value in values):
            # Refused: values of several types, integers of more than 64 bits.
            with contextlib.suppress(pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
                return pyarrow.array(values)
        return pyarrow.array([None if value is None else _cell(value) for value in values])

    parquet.write_table(pyarrow.table({name: column(name) for name in _columns(lines)}), file)


def _columns(lines: Lines) -> list[str]:
    """The keys of all lines, in the order in which they appear."""
    columns: dict[str, None] = {}
    for line in lines():
        columns.update(dict.fromkeys(line))
    return list(columns)


def _cell(value: Any) -> str:
    """A value as a text: a string as it is, no value as an empty cell, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
