"""Files of a job beside its output, and the identity by which a job is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.batch.tables.columns import FAILED
from jaxllm.common.errors import MissingFileError, RunError, naming_file, quoted
from jaxllm.common.files import LOCK_FILE, RunLock, read_json
from jaxllm.parallel.environment import changed_environment

ENVIRONMENT = "environment"
"""The part of an identity that has versions and devices, where the caller gives them."""
OUTPUT_DIGEST = "output"
"""The digest of the output, beside the identity of a job whose rows can be tried again."""
LIMITS = frozenset({"--max-new-tokens", "--max-length", "--context"})
"""Parts of an identity that may also change when rows with errors are tried again."""
ERRORS_DIGEST = "errors file"
"""The digest of the file of errors, which may change when rows are tried again."""
NOT_COMPARED = frozenset({"--model", ENVIRONMENT, OUTPUT_DIGEST, ERRORS_DIGEST})
"""Parts of an identity that may change: the model's files are compared, not their path."""
_MAX_IDENTITY_BYTES = 1 << 24
_JOURNAL_FILES = frozenset({"rows.jsonl", "merged", "job.json", "finished.json", LOCK_FILE})


def is_finished(
    output: Path, identity: Mapping[str, Any], *, resume: bool, retry: bool = False
) -> bool:
    """True if the output exists and its report is of the same job; with `retry`, only if no row of
    it has an error.

    Raises:
        RunError: an output or a journal exists and `resume` is False; or the job is another one
            than that of the journal or report; names the first part of its identity that differs.
            Or `retry`, and the journal of the finished job is gone.
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
        check_finished(output, read_json_file(finished), identity)
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


def check_finished(output: Path, before: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Checks that a finished job can be tried again.

    Args:
        before: the identity of the job, and the digests of the files that it wrote.

    Raises:
        RunError: it is another job, or one of the files has changed.
    """
    check_identity(before, identity, retry=True)
    errors = errors_file(output)
    for path, digest in ((output, OUTPUT_DIGEST), (errors, ERRORS_DIGEST)):
        if path.exists() and file_digest(path) != before.get(digest):
            advice = f"move {path} away" if path == output else "run it as an --input of its own"
            raise RunError(
                f"--retry-errors: {path} has changed since the job wrote it, and would be "
                f"replaced; {advice}"
            )


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
            missing, which would be replaced; or the journal's folder holds other files.
    """
    with naming_file(output, RunError, "created"):
        if output.is_dir():
            raise RunError(f"--output: {output} is a folder; name a file in it")
        if not output.parent.is_dir():
            raise MissingFileError(f"--output: {output.parent}: no such folder; create it")
        report, errors = report_file(output), errors_file(output)
        # The longest name is that of the file of errors while it is written.
        for path in (output, journal_folder(output), errors.with_name(f".{errors.name}.partial")):
            with contextlib.suppress(FileNotFoundError):
                path.lstat()
        for path in (output, report, errors):
            if path.is_symlink() and not path.exists():
                raise RunError(
                    f"{path}: is a link to {path.readlink()}, which is missing; give another "
                    "--output, or remove it"
                )
        check_journal_folder(journal_folder(output))
        check_errors_file(errors)


def check_errors_file(path: Path) -> None:
    """Raises RunError if a file, which a job would replace, is no file of errors."""
    if not path.exists():
        return
    with path.open("rb") as file:
        first = file.readline(_MAX_IDENTITY_BYTES)
    with contextlib.suppress(ValueError):
        if isinstance(row := json.loads(first), dict) and FAILED in row:
            return
    raise RunError(f"{path}: exists, but is no file of a job's errors; give another --output")


def check_journal_folder(folder: Path) -> None:
    """Checks that a folder holds no files but a job's, which are removed with it.

    Raises:
        RunError: it is a link or no folder, or holds something else; names the first.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        what = "a link" if folder.is_symlink() else "no folder"
        raise RunError(f"{folder}: is {what}, but jobs keep their rows in it; move it")
    entries = folder.iterdir() if folder.exists() else ()
    others = sorted(path.name for path in entries if not is_of_journal(path))
    if others:
        raise RunError(
            f"{folder}: holds {quoted(others[0])}, which no job wrote; move it, or give another "
            "--output"
        )


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


def check_identity(
    before: Mapping[str, Any], identity: Mapping[str, Any], *, retry: bool = False
) -> None:
    """Checks that a job is the one that was begun; with `retry`, `LIMITS` may differ.

    Raises:
        RunError: it is not; names the first part that differs.
    """
    now = json.loads(json.dumps(identity))  # as read from a file
    if ENVIRONMENT in now and ENVIRONMENT not in before:
        raise RunError(
            "an earlier version of jaxllm began this job, and its dtype and settings of JAX are "
            "unknown; finish it with that version, or begin another output"
        )
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if old != new and name not in NOT_COMPARED and not (retry and name in LIMITS):
            change = f"was {quoted(old)} when this job began, and is {quoted(new)} now"
            if name == "input":  # a digest
                change = "has other rows than when this job began"
            raise RunError(f"{name}: {change}; resume with what it was, or begin another output")


def job_id(identity: Mapping[str, Any]) -> str:
    """Digest of an identity."""
    compared = {name: value for name, value in identity.items() if name not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:16]


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
