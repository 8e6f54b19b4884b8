"""One writer per folder: a file lock that the operating system frees when its holder dies."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path

import filelock

from jaxllm.common.errors import RunError

LOCK_FILE = "writer.lock"


class RunLock:
    """Exclusive lock on a folder, held until `release` or until the process ends in any way.

    The lock file stays and names its last holder. What counts is the lock on it (flock), which ends
    with the process and is not inherited by a forked child. Creates the folder if needed.

    Raises:
        RunError: the folder is locked by another process or this one, or cannot be locked.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        if "\0" in str(folder):
            raise RunError(f"{str(folder)!r}: a null byte in the name of a folder")
        # A lock file without flock would outlive a killed process.
        self._lock = filelock.FileLock(
            self.path, timeout=0, thread_local=False, fallback_to_soft=False
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            self.path.write_text(_holder())
        except filelock.Timeout:
            holder = self.path.read_text(errors="replace")[:200].strip()
            raise RunError(
                f"{folder}: {holder or 'another process'} is writing here; wait for its end, or "
                "use another folder"
            ) from None
        except OSError as failure:
            self.release()
            raise RunError(
                f"{folder}: cannot be written to and locked ({failure.strerror}); use a folder on "
                "a file system with locks"
            ) from failure

    def release(self) -> None:
        """Frees the folder; a second call does nothing."""
        self._lock.release()


def _holder() -> str:
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {now}\n"
