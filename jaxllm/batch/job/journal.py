"""Journal of a job: finished rows on disk, in a file that only grows and survives a kill.

The journal of an output `out.jsonl` is the folder `out.jsonl.parts`:

- `job.json`, the job's identity (all that its results depend on), while the job is unfinished;
- `writer.lock`, the lock of the process that runs the job;
- `rows.jsonl`, the finished rows. Every record has the id of its job, so that a record of another
  job is never taken for one of this job, and a checksum of its line.

When all rows are finished they are written in the order of the input to a new file, which is then
renamed to the output. After that `job.json` becomes `finished.json`, and the folder is removed. If
rows have errors the folder stays, so that these rows can be tried again (`retry`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from jaxllm.batch.job.job_files import (
    ERRORS_DIGEST,
    OUTPUT_DIGEST,
    check_paths,
    errors_file,
    file_digest,
    finished_file,
    is_finished,
    job_id,
    journal_folder,
    read_json_file,
    remove_files,
    started_file,
)
from jaxllm.batch.tables.outputs import Line, encoded
from jaxllm.common.errors import DataError, RunError, naming_file
from jaxllm.common.files import RunLock, sync_folder, write_whole

COMMIT_SECONDS = 1.0
"""Maximum number of seconds until added rows are forced onto the disk."""
COMMIT_ROWS = 256
"""Number of added rows that are forced onto the disk at once."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a finished row in the journal's file."""

    offset: int
    length: int


class Journal:
    """The journal of one job; a context manager, which holds the job's lock.

    Args:
        output: the file that the job will write.
        identity: everything that results depend on; a resumed job must have the same.
        resume: continue a job. If False, an existing output or journal is an error.
        retry: rows with errors count as unfinished, also those of a job that has ended; `LIMITS`
            may have changed.

    Raises:
        RunError: see `is_finished`; or another process runs the job, or a file cannot be written.
        DataError: the file of rows is damaged, or holds rows of another job.
    """

    def __init__(
        self, output: Path, identity: Mapping[str, Any], *, resume: bool, retry: bool = False
    ) -> None:
        self.output, self.folder = output, journal_folder(output)
        self.done: dict[int, Place] = {}
        """Finished rows by row number."""
        check_paths(output)
        self._lock = RunLock(self.folder)
        self._rows = self.folder / "rows.jsonl"
        try:
            with naming_file(self.folder, RunError, "written"):
                self._open(identity, resume=resume, retry=retry)
                self._file: BinaryIO = self._rows.open("a+b")
                self._offset = self._rows.stat().st_size
        except BaseException:
            self._lock.release()
            raise
        self._uncommitted: list[tuple[int, Place]] = []
        self._committed_at = -COMMIT_SECONDS  # so that the first row is on the disk at once

    def _open(self, identity: Mapping[str, Any], *, resume: bool, retry: bool) -> None:
        """Checks that this job may run here, and reads what it has finished."""
        started, finished = started_file(self.folder), finished_file(self.folder)
        if is_finished(self.output, identity, resume=resume, retry=retry):
            raise RunError(f"{self.output}: another run has finished this job")
        if finished.exists():
            if retry:
                os.replace(finished, started)
            else:
                remove_files(self.folder, keep=self._lock.path)
        self._begun = read_json_file(started) if started.exists() else dict(identity)
        self.job_id = job_id(self._begun)
        if self._rows.exists():
            self.done, failed = read_rows(self._rows, self.job_id)
            for index in failed if retry else ():
                del self.done[index]
        if not started.exists():
            write_whole(started, json.dumps(identity).encode())

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
            line: what the row adds to its line of the output.
            facts: what the report counts of it (`row_facts`).
        """
        data = with_checksum({"job": self.job_id, "index": index, "facts": facts, "line": line})
        with naming_file(self._rows, RunError, "written"):
            self._file.write(data)
        self._uncommitted.append((index, Place(self._offset, len(data))))
        self._offset += len(data)
        waited = time.monotonic() - self._committed_at
        if len(self._uncommitted) >= COMMIT_ROWS or waited > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Forces added rows onto the disk."""
        with naming_file(self._rows, RunError, "written"):
            self._file.flush()
            os.fsync(self._file.fileno())
        self.done.update(self._uncommitted)
        self._uncommitted.clear()
        self._committed_at = time.monotonic()

    def records(self, count: int) -> Iterator[dict[str, Any]]:
        """Records of rows 0 to count - 1, in order.

        Raises:
            RunError: a row is missing.
            DataError: another program has changed the file.
        """
        self.commit()
        for index in range(count):
            place = self.done.get(index)
            if place is None:
                raise RunError(f"{self.folder}: row {index} is missing; run with --resume")
            with naming_file(self._rows, RunError, "read"):
                self._file.seek(place.offset)  # writing goes on at the end, wherever this reads
                data = self._file.read(place.length)
            yield self._checked_record(data, index)

    def _checked_record(self, data: bytes, index: int) -> dict[str, Any]:
        """The record in some bytes of the file of rows, which must be that of row `index`."""
        if is_intact(data):
            record = json.loads(data)
            if (record["job"], record["index"]) == (self.job_id, index):
                return record
        raise DataError(
            f"{self._rows}: was changed by another program while the job ran; run with --resume"
        )

    def merge(self, write: Callable[[BinaryIO], None]) -> None:
        """Writes the output, and renames it into place at the end.

        Raises:
            RunError: it cannot be written; or another program has put a file in its place, or
                removed the journal, while the job ran.
        """
        partial = self.folder / "merged"
        self._check_place()
        with naming_file(self.output, RunError, "written"):
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            # An equal one is this job's own, which a kill has kept from being reported, and one
            # with the digest that was noted is the one whose rows were tried again.
            if self.output.exists() and not (
                filecmp.cmp(partial, self.output, shallow=False)
                or file_digest(self.output) == self._begun.get(OUTPUT_DIGEST)
            ):
                raise RunError(
                    f"{self.output}: another program wrote this file while the job ran; move "
                    "it, and continue with --resume"
                )
            os.replace(partial, self.output)
            sync_folder(self.output.parent)

    def _check_place(self) -> None:
        """Raises RunError if the file of rows is not the one that this job writes to."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), self._rows.stat()):
                return
        raise RunError(
            f"{self.folder}: was removed or replaced while the job ran, and its rows with it; run "
            "the job again"
        )

    def finish(self, *, keep: bool) -> None:
        """Ends the job. Call it after the output and the report are written.

        The job ends with the rename of `job.json`. What a kill leaves after that is removed by the
        next run.

        Args:
            keep: the folder stays, for another try of the rows with errors; else it is removed.
        """
        with naming_file(self.folder, RunError, "written"):
            started = started_file(self.folder)
            if keep:
                (self.folder / "merged").unlink(missing_ok=True)
                digests = {
                    OUTPUT_DIGEST: file_digest(self.output),
                    ERRORS_DIGEST: file_digest(errors_file(self.output)),
                }
                noted = {**self._begun, **digests}
                write_whole(started, json.dumps(noted).encode())
            os.replace(started, finished_file(self.folder))
            sync_folder(self.folder)
            if not keep:
                remove_files(self.folder)


def with_checksum(record: Mapping[str, Any]) -> bytes:
    """One line of JSON, which begins with the CRC-32 of what follows.

    >>> with_checksum({"index": 0})
    b'{"crc32": "72835f5c", "index": 0}\\n'
    """
    content = encoded(record).removeprefix(b"{")
    return _checksum(content) + content


def is_intact(line: bytes) -> bool:
    """True for a line of `with_checksum` that has not changed since."""
    length = len(_checksum(b""))
    return line[:length] == _checksum(line[length:])


def _checksum(content: bytes) -> bytes:
    return b'{"crc32": "%08x", ' % zlib.crc32(content)


def read_rows(path: Path, job: str) -> tuple[dict[int, Place], set[int]]:
    """The finished rows in a file, and which of them have an error; the last record of a row
    counts. An incomplete last line, which a kill leaves, is cut off.

    Raises:
        DataError: another line is damaged, or a record is of another job.
    """
    rows: dict[int, Place] = {}
    failed: set[int] = set()
    offset = 0
    with path.open("r+b") as file:
        for number, data in enumerate(file, start=1):
            if not data.endswith(b"\n"):
                file.truncate(offset)
                break
            where = f"{path}, line {number}"
            if not is_intact(data):
                raise DataError(f"{where}: is damaged; remove the line to run its row again")
            record = json.loads(data)
            if record["job"] != job:
                raise DataError(f"{where}: is a row of another job; move the folder {path.parent}")
            index = record["index"]
            rows[index] = Place(offset, len(data))
            (failed.discard if record["facts"].get("error_kind") is None else failed.add)(index)
            offset += len(data)
    return rows, failed
