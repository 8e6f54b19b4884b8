"""Faults at the n-th file operation of this process: it dies, or the disk is full from there on.

A file operation is a write, truncation or fsync of a file, or a change of a folder: everything that
can leave something else on the disk. A process that dies in a write leaves half of its bytes.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER_OPERATIONS = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "fsync", "open")
KILLED = 77
"""Exit code of a process that dies at an operation."""


class _File(io.FileIO):
    """An unbuffered file whose writes and truncations are operations."""

    before: Callable[[], None]
    torn: Callable[[io.FileIO, Any], None]

    def write(self, data: Any, /) -> int:
        type(self).torn(self, data)
        return super().write(data) or 0

    def truncate(self, size: int | None = None, /) -> int:
        type(self).before()
        return super().truncate(size)


@contextmanager
def _patched(before: Callable[[], None], torn: Callable[[io.FileIO, Any], None]) -> Iterator[None]:
    """Calls `before` ahead of every operation but writes, and `torn` ahead of those."""
    file_type = type("File", (_File,), {"before": staticmethod(before), "torn": staticmethod(torn)})
    real_open = io.open

    def open_file(
        path: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any
    ) -> Any:
        if not set(mode) & set("wax+") or isinstance(path, int):
            return real_open(path, mode, buffering, *args, **kwargs)
        if not Path(path).exists() or "w" in mode:
            before()
        raw = file_type(path, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if operation is not os_open or args[1] & (os.O_CREAT | os.O_TRUNC):
                before()
            return operation(*args, **kwargs)

        return call

    os_open = os.open
    with pytest.MonkeyPatch.context() as patch:
        for name in FOLDER_OPERATIONS:
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(io, "open", open_file)
        yield


@contextmanager
def dying_at(operation: int) -> Iterator[list[int]]:
    """Ends the process at an operation, from 1 on, as a power cut would: nothing is flushed.

    Yields:
        A list with the number of operations so far.
    """
    count = [0]

    def before() -> None:
        count[0] += 1
        if count[0] == operation:
            os._exit(KILLED)

    def torn(file: io.FileIO, data: Any) -> None:
        count[0] += 1
        if count[0] == operation:
            io.FileIO.write(file, memoryview(data)[: len(data) // 2])
            os._exit(KILLED)

    with _patched(before, torn):
        yield count


@contextmanager
def disk_full_at(write: int) -> Iterator[list[int]]:
    """From a write on, from 1, files cannot grow any more; the first that fails is torn.

    Yields:
        A list with the number of writes so far.
    """
    count = [0]

    def torn(file: io.FileIO, data: Any) -> None:
        count[0] += 1
        if count[0] >= write:
            if count[0] == write:
                io.FileIO.write(file, memoryview(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with _patched(lambda: None, torn):
        yield count
