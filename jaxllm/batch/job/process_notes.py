"""Notes that the processes of one job exchange: files in the job's folder.

Each process answers its rows independently. At its end it writes a note with its counters or its
error; process 0 waits for all notes, and the others until it has merged the parts. A process that
holds its lock no more, and left no note, was lost. Notes are of one run, the journal is of all runs
of a job.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from jaxllm.batch.job.job_files import process_folder, read_json_file, started_file
from jaxllm.common.atomic_file import write_whole
from jaxllm.common.errors import RunError, naming_file
from jaxllm.common.run_lock import is_locked

POLL_SECONDS = 0.2


def note_file(folder: Path, process: int) -> Path:
    return folder / f"run-{process:05d}.json"


def remove_notes(folder: Path) -> None:
    """Removes the notes of earlier runs."""
    for path in folder.glob("run-*.json"):
        path.unlink()


def write_note(folder: Path, process: int, note: Mapping[str, Any]) -> None:
    path = note_file(folder, process)
    with naming_file(path, RunError, "written"):
        write_whole(path, json.dumps(note).encode())


@contextlib.contextmanager
def noting_failure(folder: Path, process: int) -> Generator[None]:
    """Writes a failure inside as this process's note."""
    try:
        yield
    except BaseException as failure:
        # The disk may be what failed; the failure itself matters more than that.
        with contextlib.suppress(RunError):
            reason = "it was stopped" if isinstance(failure, GeneratorExit) else str(failure)
            write_note(folder, process, {"error": reason or type(failure).__name__})
        raise


def wait_for_notes(folder: Path, processes: int) -> list[dict[str, Any]]:
    """Waits for the notes of processes 1 and above, and returns them.

    Raises:
        RunError: one of them failed or was lost.
    """
    others = range(1, processes)
    while True:
        are_running = [_is_running(folder, process) for process in others]
        if not any(are_running):
            return [read_json_file(note_file(folder, process)) for process in others]
        time.sleep(POLL_SECONDS)


def wait_for_merge(folder: Path) -> None:
    """Waits until process 0 has written the output.

    Raises:
        RunError: process 0 failed or was lost.
    """
    while started_file(folder).exists() and _is_running(folder, 0):
        time.sleep(POLL_SECONDS)


def _is_running(folder: Path, process: int) -> bool:
    """True until a process is done: it has written its note, or process 0 has ended the job.

    Raises:
        RunError: it failed, or was lost: it holds its lock no more.
    """
    # A process frees its lock after it is done, so the lock is looked at first.
    is_lost = not is_locked(process_folder(folder, process))
    path = note_file(folder, process)
    if path.exists():
        if "error" in (note := read_json_file(path)):
            raise RunError(f"process {process} failed ({note['error']}); go on with --resume")
        return False
    if not started_file(folder).exists():
        return False
    if is_lost:
        raise RunError(f"process {process} ended before its rows did; go on with --resume")
    return True
