"""Finished rows on disk before the output is: a file that only grows, whole after any kill.

The journal of an output `out.jsonl` is the folder `out.jsonl.parts`: `job.json` says what was asked
for, and each process appends to a `part-N.jsonl` of its own. When all rows are there they are
written in the order of the input into a new file, which then takes the output's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from jaxllm.common.atomic_file import sync_folder, write_whole
from jaxllm.common.errors import DataError, RunError
from jaxllm.common.run_lock import RunLock
from jaxllm.common.strict_json import parse_json, read_json

SECONDS = 1.0
"""Rows wait so long, at most, until they are forced onto the disk."""
ROWS = 256
"""Or until they are so many."""
_MAX_SETTINGS_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a finished row stands."""

    file: Path
    offset: int
    length: int


class Journal:
    """The journal of one job; a context manager, which holds the job's lock.

    Args:
        output: the file that the job will write.
        settings: all that a row's result depends on; a job that is resumed must have the same.
        resume: go on with a job; without it, an output or a journal that exists is refused.
        process: number of this process, and of its part. Process 0 begins the job, and the others
            come later, with `resume`.

    Raises:
        RunError: see `is_finished`; or another process runs the job.
    """

    def __init__(
        self, output: Path, settings: Mapping[str, Any], *, resume: bool, process: int = 0
    ) -> None:
        self.output = output
        self.folder = journal_folder(output)
        is_finished(output, settings, resume=resume)
        self.folder.mkdir(exist_ok=True)
        self._lock = RunLock(self.folder / f"process-{process:05d}")
        if process == 0:
            for other in self.folder.glob("process-*"):
                if other != self._lock.path.parent:
                    RunLock(other).release()  # refused if an earlier run's process is still there
        if not started_file(self.folder).exists():
            write_whole(started_file(self.folder), json.dumps(settings).encode())
        self._part = self.folder / f"part-{process:05d}.jsonl"
        self.done: dict[int, Place] = {}
        """Finished rows, by their number."""
        self.read_parts(repair=True)
        self._file: BinaryIO = self._part.open("ab")
        self._offset = self._part.stat().st_size
        self._unsafe: list[tuple[int, Place]] = []
        self._written = -SECONDS  # so that the first row is on the disk at once

    def read_parts(self, *, repair: bool = False) -> None:
        """What all processes have finished so far.

        Args:
            repair: cut off what a crash has torn from this process's own part.
        """
        for part in sorted(self.folder.glob("part-*.jsonl")):
            self.done.update(whole_lines(part, repair=repair and part == self._part))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.commit()
        self._file.close()
        self._lock.release()

    def add(self, index: int, line: Mapping[str, Any], prompt_tokens: int) -> None:
        """Appends a finished row; a crash may lose the rows of the last second."""
        record = {"index": index, "prompt_tokens": prompt_tokens, "line": line}
        data = encoded(record)
        self._file.write(data)
        self._unsafe.append((index, Place(self._part, self._offset, len(data))))
        self._offset += len(data)
        if len(self._unsafe) >= ROWS or time.monotonic() - self._written > SECONDS:
            self.commit()

    def commit(self) -> None:
        """Forces what was added onto the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update(self._unsafe)
        self._unsafe.clear()
        self._written = time.monotonic()

    def records(self, count: int) -> Iterator[dict[str, Any]]:
        """What was added for rows 0 to count - 1, in order.

        Raises:
            RunError: a row is missing.
        """
        self.commit()
        files: dict[Path, BinaryIO] = {}
        with contextlib.ExitStack() as opened:
            for index in range(count):
                place = self.done.get(index)
                if place is None:
                    raise RunError(f"{self.folder}: row {index} is missing; run with --resume")
                if place.file not in files:
                    files[place.file] = opened.enter_context(place.file.open("rb"))
                files[place.file].seek(place.offset)
                yield json.loads(files[place.file].read(place.length))

    def merge(self, count: int) -> Iterator[dict[str, Any]]:
        """Writes the output, giving the record of each line, and gives it its name at the end."""
        partial = self.folder / "merged"
        with partial.open("wb") as file:
            for record in self.records(count):
                file.write(encoded(record["line"]))
                yield record
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.output)
        sync_folder(self.output.parent)

    def remove(self) -> None:
        """Removes the folder, when the output has its name and the report is written."""
        shutil.rmtree(self.folder)


def is_finished(output: Path, settings: Mapping[str, Any], *, resume: bool) -> bool:
    """Whether a job is over: there is the output, and its report has the same settings.

    Raises:
        RunError: an output or a journal is there, and `resume` was not asked for; or the settings
            are not those that the job began with, with the name of the first that differs.
    """
    started = started_file(journal_folder(output))
    if not resume:
        if output.exists():
            raise RunError(f"{output}: exists already; give another --output, or remove it")
        if started.exists():
            raise RunError(
                f"{started.parent}: holds a job that was not finished; go on with --resume, or "
                "remove the folder"
            )
        return False
    if started.exists():
        check_settings(read(started), settings)
        return False
    if not output.exists():
        return False  # nothing was done before it was stopped
    if not report_file(output).exists():
        raise RunError(f"{output}: exists, but is no output of a job; give another --output")
    check_settings(read(report_file(output)).get("settings", {}), settings)
    return True


def check_settings(before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(settings))  # as it comes back from a file
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if old != new:
            raise RunError(
                f"{name}: was {old!r:.80} when this job began, and is {new!r:.80} now; resume "
                "with what it was, or begin another output"
            )


def read(path: Path) -> Any:
    return read_json(path, max_bytes=_MAX_SETTINGS_BYTES, error=RunError)


def report_file(output: Path) -> Path:
    return output.with_name(output.name + ".report.json")


def journal_folder(output: Path) -> Path:
    return output.with_name(output.name + ".parts")


def started_file(folder: Path) -> Path:
    """There as long as a job is under way."""
    return folder / "job.json"


def whole_lines(part: Path, *, repair: bool) -> dict[int, Place]:
    """The rows of a part. A last line that a crash tore does not count, and is cut off (`repair`).

    Raises:
        DataError: another line is damaged.
    """
    found: dict[int, Place] = {}
    offset = 0
    with part.open("r+b") as file:
        for number, data in enumerate(file, start=1):
            if not data.endswith(b"\n"):
                if repair:
                    file.truncate(offset)
                break
            where = f"{part}, line {number}"
            record = parse_json(data, source=where, error=DataError)
            if not isinstance(record, dict) or not isinstance(record.get("index"), int):
                raise DataError(f"{where}: is no record of a row; remove the line to run it again")
            found[record["index"]] = Place(part, offset, len(data))
            offset += len(data)
    return found


def encoded(line: Mapping[str, Any]) -> bytes:
    """One line of JSON. A lone surrogate, which has no UTF-8, is written as its escape."""
    try:
        return (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(line) + "\n").encode("ascii")
