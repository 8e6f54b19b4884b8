"""One writer a folder: a lock that the kernel lets go of when its holder dies."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import weakref
from pathlib import Path

from jaxllm.common.errors import RunError

LOCK_FILE = "writer.lock"
HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Holds a folder until `release`, or until the process ends in whatever way.

    The file stays, with the last holder's name in it: what counts is the lock on it (flock), which
    a dead process does not hold. The folder is made if it is not there.

    Raises:
        RunError: Another process, or this one, holds the folder; or it cannot be locked at all.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._file: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as failure:
            raise RunError(f"{folder}: cannot be written to ({failure.strerror})") from failure
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            holder = os.pread(file, 200, 0).decode(errors="replace").strip()
            os.close(file)
            if not isinstance(failure, BlockingIOError):
                raise RunError(
                    f"{self.path}: cannot be locked ({failure.strerror}); use a folder on a file "
                    "system with locks"
                ) from failure
            raise RunError(
                f"{folder}: {holder or 'another process'} is writing here; wait for its end, or "
                "use another folder"
            ) from None
        now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        os.ftruncate(file, 0)
        os.pwrite(
            file, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0
        )
        self._file = file
        HELD.add(self)

    def release(self) -> None:
        """Lets go; a second call does nothing."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)


def _forget_in_child() -> None:
    # A forked worker that outlives a killed run would otherwise keep the folder locked.
    for lock in list(HELD):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)
