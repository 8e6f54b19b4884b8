"""Journal of a job: finished rows on disk, in files that only grow and survive a kill.

The journal of an output `out.jsonl` is the folder `out.jsonl.parts`:

- `job.json`, the job's identity (all that its results depend on), while the job is unfinished;
- `process-N/`, the lock of process N;
- `part-N.jsonl`, the rows that process N finished. Every record has the id of its job, so that a
  record of another job is never taken for one of this job.

When all rows are finished they are written in the order of the input to a new file, which is then
renamed to the output. After that `job.json` becomes `finished.json`, and the folder is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from jaxllm.batch.job.job_files import (
    check_paths,
    finished_file,
    is_finished,
    job_id,
    journal_folder,
    process_folder,
    remove_files,
    started_file,
)
from jaxllm.batch.job.outputs import Line, Writer, encoded
from jaxllm.common.atomic_file import sync_folder, write_whole
from jaxllm.common.errors import DataError, RunError, naming_file
from jaxllm.common.run_lock import RunLock
from jaxllm.common.strict_json import parse_json

COMMIT_SECONDS = 1.0
"""Maximum number of seconds until added rows are forced onto the disk."""
COMMIT_ROWS = 256
"""Number of added rows that are forced onto the disk at once."""


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
        identity: everything that results depend on; a resumed job must have the same.
        resume: continue a job. If False, an existing output or journal is an error.
        process: number of this process and of its part. Process 0 creates the journal; the others
            open it afterwards, with `resume`.

    Raises:
        RunError: see `is_finished`; or another process runs the job, or a file cannot be written.
        DataError: a part is damaged, or holds rows of another job.
    """

    def __init__(
        self, output: Path, identity: Mapping[str, Any], *, resume: bool, process: int = 0
    ) -> None:
        self.output, self.folder = output, journal_folder(output)
        self.job_id = job_id(identity)
        self.done: dict[int, Place] = {}
        """Finished rows by row number."""
        check_paths(output)
        self._lock = RunLock(process_folder(self.folder, process))
        self._part = self.folder / f"part-{process:05d}.jsonl"
        try:
            with naming_file(self.folder, RunError, "written"):
                self._open(identity, resume=resume, leads=process == 0)
                self._file: BinaryIO = self._part.open("ab")
                self._offset = self._part.stat().st_size
        except BaseException:
            self._lock.release()
            raise
        self._uncommitted: list[tuple[int, Place]] = []
        self._committed_at = -COMMIT_SECONDS  # so that the first row is on the disk at once

    def _open(self, identity: Mapping[str, Any], *, resume: bool, leads: bool) -> None:
        """Checks that this job may run here, and reads what it has finished."""
        if leads:
            for folder in self.folder.glob("process-*"):
                if folder != self._lock.path.parent:
                    RunLock(folder).release()  # refused if an earlier run's process is still there
        if is_finished(self.output, identity, resume=resume):
            raise RunError(f"{self.output}: another run has finished it meanwhile")
        if finished_file(self.folder).exists():
            remove_files(self.folder, keep=self._lock.path.parent)
        self.read_parts(repair=True)
        if not started_file(self.folder).exists():
            write_whole(started_file(self.folder), json.dumps(identity).encode())

    def read_parts(self, *, repair: bool = False) -> None:
        """Reads the rows that all processes have finished.

        Args:
            repair: cut off an incomplete last line of this process's own part.
        """
        for part in sorted(self.folder.glob("part-*.jsonl")):
            own = repair and part == self._part
            self.done.update(read_part(part, self.job_id, repair=own))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.commit()
        finally:
            with contextlib.suppress(OSError):  # that `commit` has raised
                self._file.close()
            self._lock.release()

    def add(self, index: int, line: Line, facts: Mapping[str, Any]) -> None:
        """Appends a finished row; a crash may lose the rows of the last second.

        Args:
            line: the row's line of the output.
            facts: what the report counts of it (`row_facts`).
        """
        data = encoded({"job": self.job_id, "index": index, "facts": facts, "line": line})
        with naming_file(self._part, RunError, "written"):
            self._file.write(data)
        self._uncommitted.append((index, Place(self._part, self._offset, len(data))))
        self._offset += len(data)
        waited = time.monotonic() - self._committed_at
        if len(self._uncommitted) >= COMMIT_ROWS or waited > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Forces added rows onto the disk."""
        with naming_file(self._part, RunError, "written"):
            self._file.flush()
            os.fsync(self._file.fileno())
        self.done.update(self._uncommitted)
        self._uncommitted.clear()
        self._committed_at = time.monotonic()

    def records(self, count: int) -> Iterator[dict[str, Any]]:
        """Records of rows 0 to count - 1, in order.

        Raises:
            RunError: a row is missing.
        """
        self.commit()
        files: dict[Path, BinaryIO] = {}
        with contextlib.ExitStack() as stack:
            for index in range(count):
                place = self.done.get(index)
                if place is None:
                    raise RunError(f"{self.folder}: row {index} is missing; run with --resume")
                if place.file not in files:
                    files[place.file] = stack.enter_context(place.file.open("rb"))
                files[place.file].seek(place.offset)
                yield json.loads(files[place.file].read(place.length))

    def merge(self, count: int, write: Writer) -> None:
        """Writes the output of rows 0 to count - 1, and renames it into place at the end."""
        partial = self.folder / "merged"
        with naming_file(self.output, RunError, "written"):
            with partial.open("wb") as file:
                write(file, lambda: (record["line"] for record in self.records(count)))
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.output)
            sync_folder(self.output.parent)

    def remove(self) -> None:
        """Removes the folder. Call it after the output and the report are written.

        The job ends with the rename of `job.json`. What a kill leaves after that is removed by the
        next run.
        """
        with naming_file(self.folder, RunError, "written"):
            os.replace(started_file(self.folder), finished_file(self.folder))
            sync_folder(self.folder)
            remove_files(self.folder)


def read_part(part: Path, job: str, *, repair: bool) -> dict[int, Place]:
    """The rows of a part. An incomplete last line does not count; `repair` cuts it off.

    Raises:
        DataError: another line is damaged, or a record is of another job.
    """
    rows: dict[int, Place] = {}
    offset = 0
    with part.open("r+b") as file:
        for number, data in enumerate(file, start=1):
            if not data.endswith(b"\n"):
                if repair:
                    file.truncate(offset)
                break
            where = f"{part}, line {number}"
            record = parse_json(data, source=where, error=DataError)
            if not (
                isinstance(record, dict)
                and isinstance(record.get("index"), int)
                and isinstance(record.get("line"), dict)
                and isinstance(record.get("facts"), dict)
            ):
                raise DataError(f"{where}: is no record of a row; remove the line to run it again")
            if record.get("job") != job:
                raise DataError(f"{where}: is a row of another job; move the folder {part.parent}")
            rows[record["index"]] = Place(part, offset, len(data))
            offset += len(data)
    return rows
