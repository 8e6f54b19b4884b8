"""Journal of a job: finished rows on disk, in files that only grow and survive a kill.

The journal of an output `out.jsonl` is the folder `out.jsonl.parts`: `job.json` holds the
settings, and each process appends to its own `part-N.jsonl`. When all rows are finished they are
written in the order of the input to a new file, which is then renamed to the output.
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
"""Seconds until added rows are forced onto the disk, at most."""
ROWS = 256
"""Number of added rows that are forced onto the disk at once."""
_MAX_SETTINGS_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a finished row in the journal's files."""

    file: Path
    offset: int
    length: int


class Journal:
    """The journal of one job; a context manager, which holds the job's lock.

    Args:
        output: the file that the job will write.
        settings: everything that results depend on; a resumed job must have the same.
        resume: continue a job. If False, an existing output or journal is an error.
        process: number of this process and of its part. Process 0 creates the journal; the others
            open it afterwards, with `resume`.

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
        """Finished rows by row number."""
        self.read_parts(repair=True)
        self._file: BinaryIO = self._part.open("ab")
        self._offset = self._part.stat().st_size
        self._unsafe: list[tuple[int, Place]] = []
        self._written = -SECONDS  # so that the first row is on the disk at once

    def read_parts(self, *, repair: bool = False) -> None:
        """Reads the rows that all processes have finished.

        Args:
            repair: cut off an incomplete last line of this process's own part.
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
        """Forces added rows onto the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update(self._unsafe)
        self._unsafe.clear()
        self._written = time.monotonic()

    def records(self, count: int) -> Iterator[dict[str, Any]]:
        """Records of rows 0 to count - 1, in order.

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
        """Writes the output, yielding the record of each line; renames it into place at the end."""
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
        """Removes the folder. Call it after the output and the report are written."""
        shutil.rmtree(self.folder)


def is_finished(output: Path, settings: Mapping[str, Any], *, resume: bool) -> bool:
    """True if the output exists and its report has the same settings.

    Raises:
        RunError: an output or a journal exists and `resume` is False; or the settings differ from
            those of the journal or report. Names the first that differs.
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
    now = json.loads(json.dumps(settings))  # as read from a file
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
    """The file that exists while a job is unfinished."""
    return folder / "job.json"


def whole_lines(part: Path, *, repair: bool) -> dict[int, Place]:
    """The rows of a part. An incomplete last line does not count; `repair` cuts it off.

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
    """One line of JSON. Lone surrogates, which UTF-8 cannot encode, are written as escapes."""
    try:
        return (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(line) + "\n").encode("ascii")
