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
    """Holds a folder until `release`, or until the process ends in whatever way.

    The lock file stays and names its last holder. Only the lock on it counts (flock), which a dead
    process does not hold and a forked child does not inherit. Makes the folder if it is not there.

    Raises:
        RunError: Another process, or this one, holds the folder; or it cannot be locked at all.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
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
