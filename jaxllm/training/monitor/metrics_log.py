"""Writes OUTPUT/metrics.jsonl and OUTPUT/metrics.csv: the metrics of each step, one line per step.

The lines of metrics.jsonl are strict JSON, each with a `step` one higher than that of the line
before; step 0 is an evaluation before the first step. A number that is not finite, which JSON
does not have, is null, and the object `nonfinite` holds it:
``{"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}``.

metrics.csv is the same as a table, with a column for each field of any step. It is written again
from metrics.jsonl whenever a run starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxllm.common.errors import InputError, RunError
from jaxllm.training.monitor.metrics_lines import (
    NONFINITE,
    MetricsRow,
    csv_line,
    is_torn,
    json_line,
    parse_line,
    plain_value,
)
from jaxllm.training.output_files import replacing, writing

_RESERVED = ("step", NONFINITE)


class NoLog:
    """A log that writes nothing, for all processes but the first."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def amend(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def sync(self) -> None: ...


class MetricsLog:
    """The two files of a run; open it once, in one process.

    A killed process (kill -9) leaves at most one torn line, which the next start removes. Call
    `sync` before a checkpoint is committed: then a power cut leaves the line of every step up to
    the checkpoint's on disk.

    Args:
        folder: folder of the run; created if needed.
        resume_at: step of the checkpoint that the run resumes from; lines of later steps are cut
            off, since those steps are repeated. 0: all lines. None: a new run.

    Raises:
        RunError: A new run finds lines of another; or the lines up to `resume_at` are broken or
            not all there; or the files cannot be written.
    """

    def __init__(self, folder: str | PathLike[str], *, resume_at: int | None = None) -> None:
        folder = Path(folder)
        self.path, self.csv_path = folder / "metrics.jsonl", folder / "metrics.csv"
        self._last: int | None = None
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            if resume_at is not None:
                self._last = _cut(self.path, resume_at)
            elif self.path.exists() and self.path.stat().st_size > 0:
                raise RunError(
                    f"{self.path}: holds the steps of another run; resume that run, or choose "
                    "another output folder"
                )
            self._lines = self.path.open("ab", buffering=0)
        try:
            self._write_table()
        except RunError:
            self._lines.close()
            raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the line of a step, and writes it without buffering.

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
        row: MetricsRow = {"step": step} | {
            name: plain_value(name, x) for name, x in metrics.items()
        }
        try:
            _append(self._lines, json_line(row))
            if row.keys() <= set(self._columns):
                _append(self._table, csv_line(row.get(name) for name in self._columns))
            else:
                self._write_table()
        except OSError as failure:
            raise RunError(
                f"{self.path.parent}: the metrics of step {step} cannot be written "
                f"({failure.strerror})"
            ) from failure
        self._last = step

    def amend(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds fields to the line of the last step, such as those of a late evaluation.

        The file is replaced atomically: a kill leaves the old or the new one.

        Raises:
            InputError: It is not the last step; or as `log`.
            RunError: The disk is full.
        """
        if self._last not in (None, step):
            raise InputError(f"step: expected the last one, {self._last}, found {step}")
        fields = {name: plain_value(name, x) for name, x in metrics.items()}
        with replacing(self.path) as half, half.open("wb") as lines:
            for row in _amended(iterate_metrics(self.path), step, fields):
                lines.write(json_line(row))
        self._lines.close()
        with writing(self.path):
            self._lines = self.path.open("ab", buffering=0)
        self._last = step
        self._write_table()

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
        """Writes the table again from the lines, with a column for each field so far."""
        if hasattr(self, "_table"):
            self._table.close()
        names = {"step": None}
        for row in iterate_metrics(self.path):
            names |= dict.fromkeys(row)
        self._columns = list(names)
        with replacing(self.csv_path) as half, half.open("wb") as table:
            table.write(csv_line(self._columns))
            for row in iterate_metrics(self.path):
                table.write(csv_line(row.get(name) for name in self._columns))
        with writing(self.csv_path):
            self._table = self.csv_path.open("ab", buffering=0)


def read_metrics(path: str | PathLike[str]) -> list[MetricsRow]:
    """All rows of a metrics.jsonl, with numbers that are not finite as floats.

    Raises:
        RunError: A line is no JSON object with a step; the message names the line.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | PathLike[str]) -> Iterator[MetricsRow]:
    """`read_metrics`, line by line."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield parse_line(line, f"{path}, line {number}")


def _cut(path: Path, resume_at: int) -> int | None:
    """Cuts off the lines after that of step `resume_at`; returns the step of the last line left.

    Lines after it are not read: they may be torn.
    """
    if not path.exists():
        return None  # moved away, perhaps: a new log starts after the checkpoint
    if resume_at == 0:
        os.truncate(path, 0)
        return None
    last: int | None = None
    with path.open("rb+") as lines:
        keep, number = 0, 0
        while last is None or last < resume_at:
            line = lines.readline()
            number += 1
            where = f"{path}, line {number}"
            torn = not line.endswith(b"\n")
            if torn and is_torn(line):
                break
            step: int = parse_line(line, where)["step"]
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


def _amended(rows: Iterable[MetricsRow], step: int, fields: MetricsRow) -> Iterator[MetricsRow]:
    """The rows, with fields added to that of the last step; it is appended if missing."""
    last = None
    for row in rows:
        last = row["step"]
        yield row | fields if last == step else row
    if last != step:
        yield {"step": step} | fields


def _append(file: FileIO, line: bytes) -> None:
    """Writes a line without buffering; a single write may take only a part of it."""
    while line:
        line = line[file.write(line) :]
