"""Writes OUTPUT/metrics.jsonl and OUTPUT/metrics.csv: the metrics of each step, one line per step.

The lines of metrics.jsonl are strict JSON, each with a `step` one higher than the line before;
step 0 is an evaluation before the first step. A non-finite number, which JSON lacks, is written as
null and kept in the object `nonfinite`:
``{"step": 3, "loss": null, "nonfinite": {"loss": "nan"}}``.

metrics.csv is the same as a table, with a column for each field of any step. It is rewritten
from metrics.jsonl whenever a run starts.

Sinks are copies of the metrics for TensorBoard and Weights & Biases; metrics.jsonl is the
authoritative record. Like the log, sinks are opened with the step at which a run resumes, and show
no step twice.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO, StringIO
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.common.errors import InputError, RunError, naming_file
from jaxllm.common.files import write_whole
from jaxllm.common.optional_packages import require

Value = float | int | bool | str | None
MetricsRow = dict[str, Any]
"""`step`, an int, and a `Value` for each metric."""

NONFINITE = "nonfinite"
_RESERVED = ("step", NONFINITE)
# Otherwise W&B sends the command line with its secrets, and data about the machine.
QUIET = {"x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True}


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """Writer of the two metrics files of a run; open it once, in one process.

    A killed process (kill -9) leaves at most one incomplete line, which the next start removes.
    Call `sync` before a checkpoint is committed, so that all lines up to the checkpoint's step
    survive a power cut.

    Args:
        folder: folder of the run; created if needed.
        resume_at: step of the checkpoint that the run resumes from; lines of later steps are
            removed, since those steps are repeated. 0: removes all lines. None: a new run.

    Raises:
        RunError: a new run finds lines of another run; the lines up to `resume_at` are invalid or
            incomplete; or the files cannot be written.
    """

    def __init__(self, folder: str | PathLike[str], *, resume_at: int | None = None) -> None:
        folder = Path(folder)
        self.path, self.csv_path = folder / "metrics.jsonl", folder / "metrics.csv"
        self._last: int | None = None
        with naming_file(self.path, RunError, "written"):
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
        """Appends the line of a step, unbuffered.

        Args:
            step: one more than the previous step; the first line of a run may have any step.
            metrics: numbers (single elements of Python, numpy or JAX), strings, None.

        Raises:
            InputError: a step that leaves a gap or was already logged, or a value of another type.
            RunError: the disk is full.
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
                _append(self._table, csv_line(map(row.get, self._columns)))
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
            InputError: it is not the last step; or as `log`.
            RunError: the disk is full.
        """
        if self._last not in (None, step):
            raise InputError(f"step: expected the last one, {self._last}, found {step}")
        fields = {name: plain_value(name, x) for name, x in metrics.items()}
        rows = read_metrics(self.path)
        if not rows or rows[-1]["step"] != step:
            rows.append({"step": step})
        rows[-1] |= fields
        with naming_file(self.path, RunError, "written"):
            write_whole(self.path, b"".join(map(json_line, rows)))
        self._lines.close()
        with naming_file(self.path, RunError, "written"):
            self._lines = self.path.open("ab", buffering=0)
        self._last = step
        self._write_table()

    def sync(self) -> None:
        """Forces all lines to disk (fsync)."""
        os.fsync(self._lines.fileno())

    def close(self) -> None:
        self._lines.close()
        self._table.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _write_table(self) -> None:
        """Rewrites metrics.csv from metrics.jsonl, with a column for each field so far."""
        if hasattr(self, "_table"):
            self._table.close()
        names = {"step": None}
        for row in iterate_metrics(self.path):
            names |= dict.fromkeys(row)
        self._columns = list(names)
        lines = (csv_line(map(row.get, self._columns)) for row in iterate_metrics(self.path))
        with naming_file(self.csv_path, RunError, "written"):
            write_whole(self.csv_path, csv_line(self._columns) + b"".join(lines))
            self._table = self.csv_path.open("ab", buffering=0)


def read_metrics(path: str | PathLike[str]) -> list[MetricsRow]:
    """Reads all rows of a metrics.jsonl; non-finite numbers are floats.

    Raises:
        RunError: a line is not a JSON object with a step; names the line.
    """
    return list(iterate_metrics(path))


def iterate_metrics(path: str | PathLike[str]) -> Iterator[MetricsRow]:
    """Iterates over the rows of a metrics.jsonl; see `read_metrics`."""
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            yield parse_line(line, f"{path}, line {number}")


def is_scalar(value: Any) -> bool:
    """True for a single number of Python, numpy or JAX.

    >>> is_scalar(1.5), is_scalar(np.float32(2)), is_scalar("a"), is_scalar(None)
    (True, True, False, False)
    """
    if value is None or isinstance(value, str):
        return False
    array = np.asarray(value)
    return array.size == 1 and (array.dtype.kind in "biuf" or array.dtype.name == "bfloat16")


def parse_line(line: bytes, where: str) -> MetricsRow:
    """Parses a line of metrics.jsonl; `where` names the line in errors."""
    try:
        row = json.loads(line)
    except ValueError as failure:
        raise RunError(f"{where}: not JSON ({failure}); move the file away") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise RunError(f"{where}: expected an object with an integer step; move the file away")
    try:
        return row | {name: float(text) for name, text in row.pop(NONFINITE, {}).items()}
    except (AttributeError, TypeError, ValueError):
        raise RunError(
            f"{where}: {NONFINITE}: expected fields that are nan or inf; move the file away"
        ) from None


def plain_value(name: str, x: Any) -> Value:
    """Converts a metric to a JSON and CSV value."""
    if x is None or isinstance(x, str):
        return x
    array = np.asarray(x)
    if not is_scalar(array):
        raise InputError(
            f"metrics[{name!r}]: expected a number or a string, found {array.dtype} of shape "
            f"{array.shape}"
        )
    return array.astype(float).item() if array.dtype.name == "bfloat16" else array.item()


def json_line(row: MetricsRow) -> bytes:
    """Formats a row as a line of metrics.jsonl."""
    bad = {
        name: str(value)
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    fields: dict[str, Any] = {name: None if name in bad else x for name, x in row.items()}
    if bad:
        fields[NONFINITE] = bad
    return (json.dumps(fields, allow_nan=False) + "\n").encode()


def csv_line(values: Iterable[Value]) -> bytes:
    """Formats values as a line of metrics.csv."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(values))
    return text.getvalue().encode("utf-8")


def _cut(path: Path, resume_at: int) -> int | None:
    """Removes the lines after step `resume_at`; returns the step of the last remaining line.

    Removed lines are not parsed: they may be incomplete.
    """
    if not path.exists():
        return None  # it may have been moved away: start a new log after the checkpoint
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
            lacks_line_end = not line.endswith(b"\n")
            if lacks_line_end:
                try:
                    json.loads(line)
                except ValueError:  # incomplete, as a killed process may leave it
                    break
            step: int = parse_line(line, where)["step"]
            if last is None and step > resume_at:
                break
            if last is not None and step != last + 1:
                raise RunError(
                    f"{where}: step {step} after step {last}; move the file away to start a new "
                    "log at the checkpoint"
                )
            if lacks_line_end:  # complete except for the line end
                lines.write(b"\n")
            last, keep = step, lines.tell()
        lines.truncate(keep)
    if last is not None and last < resume_at:
        raise RunError(
            f"{path}: ends with step {last}, but the checkpoint is of step {resume_at}; move the "
            "file away to start a new log at the checkpoint"
        )
    return resume_at if last is None else last


def _append(file: FileIO, line: bytes) -> None:
    """Writes a whole line unbuffered; a single write may be partial."""
    while line:
        line = line[file.write(line) :]


class Sink(Protocol):
    """Receives the metrics of steps; `MetricsLog` implements it as well."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a step."""
        ...

    def close(self) -> None: ...


def tensorboard_package() -> Any:
    return require("tensorboardX", extra="tensorboard", purpose="TensorBoard files")


def wandb_package() -> Any:
    return require("wandb", extra="wandb", purpose="Weights & Biases logs")


class TensorBoardSink:
    """Writes OUTPUT/tensorboard, for ``tensorboard --logdir OUTPUT``.

    Writes only numbers, including NaN and infinity. A resumed run writes another file: it tells
    TensorBoard to drop the earlier ones (`purge_step`) and repeats the steps of metrics.jsonl, so
    that steps still queued at a kill are not lost.

    Args:
        folder: folder of the run, with metrics.jsonl.
        resume_at: step at which the run resumes.

    Raises:
        MissingExtraError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | PathLike[str], *, resume_at: int | None = None) -> None:
        module = tensorboard_package()
        folder = Path(folder)
        self._writer = module.SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=None if resume_at is None else 0,
            flush_secs=10,
        )
        record = folder / "metrics.jsonl"
        if resume_at is not None and record.exists():
            for row in iterate_metrics(record):
                if row["step"] > resume_at:
                    break
                self.log(row.pop("step"), row)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if is_scalar(value):
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases; ``mode="offline"`` (or WANDB_MODE=offline) needs no network.

    The run's id is kept in OUTPUT/wandb_id, so that a resumed run continues the same W&B run. W&B
    keeps the first value of a step, so no step appears twice. Offline, each start has its own
    folder in OUTPUT/wandb; send them in order with ``wandb sync --append``.

    Console output, code, command line and machine data are not sent.

    Args:
        folder: folder of the run.
        config: config of the run card, without secrets.
        mode: "online", "offline" or "disabled"; None: from the environment variable.
        resume_at: step at which the run resumes.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        project: str = "jaxllm",
        mode: str | None = None,
        resume_at: int | None = None,
    ) -> None:
        module = wandb_package()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_id"
        if resume_at is None or not id_file.exists():
            with naming_file(id_file, RunError, "written"):
                write_whole(id_file, secrets.token_hex(6).encode())
        self._run = module.init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume=None if resume_at is None or mode == "offline" else "allow",
            config=dict(config or {}),
            mode=mode,
            settings=module.Settings(
                console="off", disable_git=True, save_code=False, silent=True, **QUIET
            ),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        plain = {k: float(v) if is_scalar(v) else v for k, v in metrics.items() if v is not None}
        self._run.log(plain, step=step)

    def close(self) -> None:
        self._run.finish()
