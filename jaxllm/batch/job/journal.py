"""Journal of a job: finished rows on disk, in a file that only grows and survives a kill.

The journal of an output `out.jsonl` is the folder `out.jsonl.parts`:

- `job.json`, the job's identity (all that its results depend on), while the job is unfinished;
- `writer.lock`, the lock of the process that runs the job;
- `rows.jsonl`, the finished rows. Every record has the id of its job, so that a record of another
  job is never taken for one of this job, and a checksum of its line;
- `pools.json`, the sizes of the programs that the rows run in, where the engine keeps them, with
  a checksum.

When all rows are finished they are written in the order of the input to a new file, which is then
renamed to the output. After that `job.json` becomes `finished.json`, and the folder is removed. If
rows have errors the folder stays, so that these rows can be tried again (`retry`).
"""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from jaxllm.batch.job.identity import (
    DIGESTS,
    ENVIRONMENT,
    ERRORS_DIGEST,
    OUTPUT_DIGEST,
    check_identity,
    job_id,
)
from jaxllm.batch.tables.columns import FAILED
from jaxllm.batch.tables.source import Line, encoded
from jaxllm.common.errors import DataError, MissingFileError, RunError, naming_file, quoted
from jaxllm.common.files import LOCK_FILE, RunLock, read_json, sync_folder, write_whole
from jaxllm.parallel.environment import changed_environment

COMMIT_SECONDS = 1.0
"""Maximum number of seconds until added rows are forced onto the disk."""
COMMIT_ROWS = 256
"""Number of added rows that are forced onto the disk at once."""
_MAX_IDENTITY_BYTES = 1 << 24
_JOURNAL_FILES = frozenset(
    {"rows.jsonl", "pools.json", "merged", "job.json", "finished.json", LOCK_FILE}
)


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
        self.done: dict[int, int] = {}
        """Finished rows: where the line of each begins in the file of rows, by row number."""
        check_paths(output)
        self._lock = RunLock(self.folder)
        self._rows, self._pools = self.folder / "rows.jsonl", self.folder / "pools.json"
        self.pools: dict[str, Any] = {}
        """What `save_pools` saved last."""
        try:
            with naming_file(self.folder, RunError, "written"):
                self._open(identity, resume=resume, retry=retry)
                self._file: BinaryIO = self._rows.open("a+b")
                self._offset = self._rows.stat().st_size
        except BaseException:
            self._lock.release()
            raise
        self._uncommitted: list[tuple[int, int]] = []
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
        if self._pools.exists():
            kept = read_pools(self._pools)
            self.pools = kept if kept.get("job") == self.job_id else {}
        if not started.exists():
            write_whole(started, json.dumps(identity).encode())

    @property
    def settings(self) -> dict[str, Any]:
        """The identity with which the job was begun; rows that are tried again do not change it."""
        return {name: value for name, value in self._begun.items() if name not in DIGESTS}

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
        self._uncommitted.append((index, self._offset))
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

    def save_pools(self, pools: Mapping[str, Any]) -> None:
        """Forces the pools of the engine onto the disk."""
        self.pools = {"job": self.job_id, **pools}
        with naming_file(self._pools, RunError, "written"):
            write_whole(self._pools, with_checksum(self.pools))

    def records(self, count: int) -> Iterator[dict[str, Any]]:
        """Records of rows 0 to count - 1, in order.

        Raises:
            RunError: a row is missing.
            DataError: another program has changed the file.
        """
        self.commit()
        for index in range(count):
            if index not in self.done:
                raise RunError(f"{self.folder}: row {index} is missing; run with --resume")
            with naming_file(self._rows, RunError, "read"):
                self._file.seek(self.done[index])  # writing goes on at the end, wherever this reads
                data = self._file.readline()
            record = json.loads(data) if is_intact(data) else {}
            if (record.get("job"), record.get("index")) != (self.job_id, index):
                raise DataError(
                    f"{self._rows}: was changed by another program while the job ran; run with "
                    "--resume"
                )
            yield record

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


def read_pools(path: Path) -> dict[str, Any]:
    """The pools that were saved in a file.

    Raises:
        DataError: the file is damaged.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_IDENTITY_BYTES)
    if not is_intact(data):
        raise DataError(
            f"{path}: is damaged; remove it to choose the sizes of programs anew, so that the rows "
            "that are left may differ by rounding"
        )
    return json.loads(data)


def read_rows(path: Path, job: str) -> tuple[dict[int, int], set[int]]:
    """Where the finished rows in a file begin, and which of them have an error; the last record of
    a row counts. An incomplete last line, which a kill leaves, is cut off.

    Raises:
        DataError: another line is damaged, or a record is of another job.
    """
    rows: dict[int, int] = {}
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
            rows[index] = offset
            (failed.discard if record["facts"].get("error_kind") is None else failed.add)(index)
            offset += len(data)
    return rows, failed


def is_finished(
    output: Path, identity: Mapping[str, Any], *, resume: bool, retry: bool = False
) -> bool:
    """True if the output exists and its report is of the same job; with `retry`, only if no row of
    it has an error.

    Raises:
        RunError: an output or a journal exists and `resume` is False; or the journal or report
            belongs to another job, and the message names the first part of the identity that
            differs; or `retry`, and the journal of the finished job is gone, or a file that it
            wrote has changed.
    """
    folder = journal_folder(output)
    started = started_file(folder)
    if not resume:
        if started.exists():
            raise RunError(
                f"{folder}: holds an unfinished job; continue it with --resume, or remove the "
                "folder"
            )
        if output.exists():
            raise RunError(f"{output}: exists already; give another --output, or remove it")
        read_report(output)
        return False
    if started.exists():
        check_identity(read_json_file(started), identity, retry=retry)
        return False
    report, finished = read_report(output), finished_file(folder)
    if retry and finished.exists():
        before = read_json_file(finished)
        check_identity(before, identity, retry=True)
        for path, digest, advice in (
            (output, OUTPUT_DIGEST, f"move {output} away"),
            (errors_file(output), ERRORS_DIGEST, "run it as an --input of its own"),
        ):
            if path.exists() and file_digest(path) != before.get(digest):
                raise RunError(
                    f"--retry-errors: {path} has changed since the job wrote it, and would be "
                    f"replaced; {advice}"
                )
    if not output.exists():
        return False  # nothing was done before it was stopped
    if report is None:
        raise RunError(f"{output}: exists, but no job wrote it; give another --output")
    check_identity(report["settings"], identity, retry=retry)
    if not (retry and report["errors"]):
        return True
    if not finished.exists():
        raise RunError(
            f"--retry-errors: {folder} is gone, which had the results of the other rows; run a job "
            f"on {errors_file(output)} instead, with another --output"
        )
    return False


def read_report(output: Path) -> dict[str, Any] | None:
    """The report beside the output; None if there is none.

    Raises:
        RunError: the file of that name is no report of a job, so that it must not be replaced.
    """
    path = report_file(output)
    if not path.exists():
        return None
    report = read_json_file(path)
    if not isinstance(report.get("settings"), dict) or "errors" not in report:
        raise RunError(f"{path}: is not the report of a job; give another --output")
    return report


def check_output(
    output: Path, identity: Mapping[str, Any], *, resume: bool, retry: bool = False
) -> bool:
    """`is_finished`; before that it checks that no other run is writing this output.

    Raises:
        RunError: also if the output and the files beside it cannot be written.
    """
    check_paths(output)
    folder = journal_folder(output)
    if not folder.exists():
        return is_finished(output, identity, resume=resume, retry=retry)
    lock = RunLock(folder)
    try:
        finished = is_finished(output, identity, resume=resume, retry=retry)
        report = read_report(output)
        if finished and not (report and report["errors"]):
            with naming_file(folder, RunError, "written"):
                remove_files(folder)
        return finished
    finally:
        lock.release()


def check_paths(output: Path) -> None:
    """Checks the path of an output and the names of the files beside it.

    Raises:
        MissingFileError: its folder does not exist.
        RunError: it is a folder, or a name is too long, or no path; or a link to a file that is
            missing, which would be replaced; or the journal's folder, which is removed with its
            files, holds other files; or a file of errors, which would be replaced, is no such file.
    """
    with naming_file(output, RunError, "created"):
        if output.is_dir():
            raise RunError(f"--output: {output} is a folder; name a file in it")
        if not output.parent.is_dir():
            raise MissingFileError(f"--output: {output.parent}: no such folder; create it")
        report, errors, folder = report_file(output), errors_file(output), journal_folder(output)
        # The longest name is that of the file of errors while it is written.
        for path in (output, folder, errors.with_name(f".{errors.name}.partial")):
            with contextlib.suppress(FileNotFoundError):
                path.lstat()
        for path in (output, report, errors):
            if path.is_symlink() and not path.exists():
                raise RunError(
                    f"{path}: is a link to {path.readlink()}, which is missing; give another "
                    "--output, or remove it"
                )
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            what = "a link" if folder.is_symlink() else "no folder"
            raise RunError(f"{folder}: is {what}, but jobs keep their rows in it; move it")
        entries = folder.iterdir() if folder.exists() else ()
        if others := sorted(path.name for path in entries if not is_of_journal(path)):
            raise RunError(
                f"{folder}: holds {quoted(others[0])}, which no job wrote; move it, or give "
                "another --output"
            )
        if errors.exists() and not is_errors_file(errors):
            raise RunError(
                f"{errors}: exists, but is no file of a job's errors; give another --output"
            )


def is_errors_file(path: Path) -> bool:
    """True if the first line of a file is a row with an error."""
    with path.open("rb") as file:
        first = file.readline(_MAX_IDENTITY_BYTES)
    with contextlib.suppress(ValueError):
        row = json.loads(first)
        return isinstance(row, dict) and FAILED in row
    return False


def is_of_journal(path: Path) -> bool:
    """True for a regular file with a name that a journal writes."""
    partial = path.name.startswith(".") and path.name.endswith(".partial")
    try:
        return (path.name in _JOURNAL_FILES or partial) and stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:  # renamed meanwhile by the process that runs the job
        return True


def started_elsewhere(output: Path, identity: Mapping[str, Any]) -> str | None:
    """A remark on versions and devices that are other ones than when an unfinished job began."""
    started = started_file(journal_folder(output))
    if not started.exists():
        return None
    return changed_environment(read_json_file(started)[ENVIRONMENT], identity[ENVIRONMENT])


def read_json_file(path: Path) -> dict[str, Any]:
    """Reads a JSON object that a job wrote.

    Raises:
        RunError: the file is not such an object.
    """
    content = read_json(path, max_bytes=_MAX_IDENTITY_BYTES, error=RunError)
    if not isinstance(content, dict):
        raise RunError(f"{path}: is not a file of a job; give another --output")
    return content


def report_file(output: Path) -> Path:
    return output.with_name(output.name + ".report.json")


def errors_file(output: Path) -> Path:
    """The rows with errors, and their inputs."""
    return output.with_name(output.name + ".errors.jsonl")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def journal_folder(output: Path) -> Path:
    return output.with_name(output.name + ".parts")


def started_file(folder: Path) -> Path:
    """The file that exists while a job is unfinished."""
    return folder / "job.json"


def finished_file(folder: Path) -> Path:
    """The file that exists while the folder of a finished job is removed."""
    return folder / "finished.json"


def remove_files(folder: Path, keep: Path | None = None) -> None:
    """Removes the folder of a finished job; the file that marks it as such goes last.

    Files that others put there meanwhile stay, and so does the folder then.

    Args:
        keep: a file in it that stays, and so does `folder`.
    """
    marker = finished_file(folder)
    for path in folder.iterdir():
        if path not in (marker, keep) and is_of_journal(path):
            path.unlink()
    marker.unlink(missing_ok=True)
    if keep is None and not any(folder.iterdir()):
        folder.rmdir()
