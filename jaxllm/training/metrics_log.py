"""OUTPUT/metrics.jsonl and OUTPUT/metrics.csv: what was measured, one line a step.

The lines of metrics.jsonl are strict JSON, each with a `step` one higher than that of the line
before. A number that is not finite, for which JSON has no token, is null, and the object
`nonfinite` says what it was: ``{"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}``.

metrics.csv holds the same as a table with one column for each field that any step has, empty where
a step has none. It follows from metrics.jsonl and is made anew from it whenever a run starts.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO, StringIO
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxllm.errors import InputError, RunError

Value = float | int | bool | str | None
Row = dict[str, Any]
"""`step`, an int, and a `Value` for each metric."""

_NONFINITE = "nonfinite"
_RESERVED = ("step", _NONFINITE)


class NoLog:
    """What a process writes whose numbers another one writes."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...


class MetricsLog:
    """The two files of one run; open it once, in one process.

    A killed process (kill -9) leaves whole lines and at most one torn one, which the next start
    repairs. Against a power cut call `sync` before a checkpoint is committed: then every step up
    to the checkpoint's has its line on the disk.

    Args:
        folder: Of the run; made if it is not there.
        resume_at: The step of the checkpoint from which the run goes on; lines of later steps are
            cut off, since these steps come again. None: a new run.

    Raises:
        RunError: A new run finds lines of another; or the lines up to `resume_at` are broken or
            not all there.
    """

    def __init__(self, folder: str | PathLike[str], *, resume_at: int | None = None) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.csv_path = folder / "metrics.jsonl", folder / "metrics.csv"
        self._last: int | None = None
        if resume_at is not None:
            self._last = _cut(self.path, resume_at)
        elif self.path.exists() and self.path.stat().st_size > 0:
            raise RunError(
                f"{self.path}: holds the steps of another run; resume that run, or choose another "
                "output folder"
            )
        self._lines = self.path.open("ab", buffering=0)
        self._write_table()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the line of one step, and hands it to the operating system.

        Args:
            step: One more than the step before; the first line of a run may have any step.
            metrics: Numbers (Python's, numpy's or JAX's, of one element), strings, None.

        Raises:
            InputError: A step that leaves a gap or is there already, a value of another type.
            RunError: The disk is full.
        """
        if self._last is not None and step != self._last + 1:
            raise InputError(f"step: expected {self._last + 1} after {self._last}, found {step}")
        for name in _RESERVED:
            if name in metrics:
                raise InputError(f"metrics[{name!r}]: the log itself writes this field")
        row: Row = {"step": step} | {name: _value(name, x) for name, x in metrics.items()}
        try:
            _append(self._lines, _line(row))
            if row.keys() <= set(self._columns):
                _append(self._table, _csv_line(row.get(name) for name in self._columns))
            else:
                self._write_table()
        except OSError as failure:
            raise RunError(
                f"{self.path.parent}: the metrics of step {step} cannot be written "
                f"({failure.strerror})"
            ) from failure
        self._last = step

    def sync(self) -> None:
        """Waits until every line is on the disk."""
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        self._lines.close()
        self._table.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write_table(self) -> None:
        """Makes the table anew from the lines, with a column for each field there is by now."""
        if hasattr(self, "_table"):
            self._table.close()
        names = {"step": None}
        for row in iterate_metrics(self.path):
            names |= dict.fromkeys(row)
        self._columns = list(names)
        half = self.csv_path.with_suffix(".csv.tmp")
        with half.open("wb") as table:
            table.write(_csv_line(self._columns))
            for row in iterate_metrics(self.path):
                table.write(_csv_line(row.get(name) for name in self._columns))
        half.replace(self.csv_path)
        self._table = self.csv_path.open("ab", buffering=0)


def read_metrics(path: str | PathLike[str]) -> list[Row]:
    """All lines of a metrics.jsonl as dicts; numbers that are not finite are floats again.

    Raises:
        RunError: A line is no JSON object with a step; the message names the line.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | PathLike[str]) -> Iterator[Row]:
    """`read_metrics`, line by line."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield _parsed(line, f"{path}, line {number}")


def is_number(value: Any) -> bool:
    """Whether a metric is one number: Python's, numpy's or JAX's.

    >>> is_number(1.5), is_number(np.float32(2)), is_number("a"), is_number(None)
    (True, True, False, False)
    """
    if value is None or isinstance(value, str):
        return False
    array = np.asarray(value)
    return array.size == 1 and (array.dtype.kind in "biuf" or array.dtype.name == "bfloat16")


def _cut(path: Path, resume_at: int) -> int | None:
    """Cuts off what comes after the line of step `resume_at`; the step of the line then last.

    Whatever follows that line is not even read: it may be torn, or come from a later time.
    """
    if not path.exists():
        return None  # moved away, perhaps: the log starts anew, after the checkpoint
    last: int | None = None
    with path.open("rb+") as lines:
        keep, number = 0, 0
        while last is None or last < resume_at:
            line = lines.readline()
            number += 1
            where = f"{path}, line {number}"
            torn = not line.endswith(b"\n")
            if torn and _is_torn(line):
                break
            step: int = _parsed(line, where)["step"]
            if last is None and step > resume_at:
                break
            if last is not None and step != last + 1:
                raise RunError(
                    f"{where}: step {step} after step {last}; move the file away to start a new "
                    "log at the checkpoint"
                )
            if torn:  # whole, but for the end of the line
                lines.write(b"\n")
            last, keep = step, lines.tell()
        lines.truncate(keep)
    if last is not None and last < resume_at:
        raise RunError(
            f"{path}: ends with step {last}, but the checkpoint is of step {resume_at}; move the "
            "file away to start a new log at the checkpoint"
        )
    return resume_at if last is None else last


def _is_torn(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def _parsed(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as failure:
        raise RunError(f"{where}: not JSON ({failure}); move the file away") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise RunError(f"{where}: expected an object with an integer step; move the file away")
    for name, text in row.pop(_NONFINITE, {}).items():
        row[name] = float(text)
    return row


def _value(name: str, x: Any) -> Value:
    """x as something that JSON or CSV can hold."""
    if x is None or isinstance(x, str):
        return x
    array = np.asarray(x)
    if not is_number(array):
        raise InputError(
            f"metrics[{name!r}]: expected a number or a string, found {array.dtype} of shape "
            f"{array.shape}"
        )
    return array.astype(float).item() if array.dtype.name == "bfloat16" else array.item()


def _line(row: Row) -> bytes:
    bad = {
        name: str(value)
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    fields: dict[str, Any] = {name: None if name in bad else x for name, x in row.items()}
    if bad:
        fields[_NONFINITE] = bad
    return (json.dumps(fields, allow_nan=False) + "\n").encode()


def _append(file: FileIO, line: bytes) -> None:
    """Hands a line to the operating system, which may take a part of it only."""
    while line:
        line = line[file.write(line) :]


def _csv_line(values: Iterable[Value]) -> bytes:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(values))
    return text.getvalue().encode("utf-8")
