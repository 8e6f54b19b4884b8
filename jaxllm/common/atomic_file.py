"""Files that are there as a whole or not at all, whatever ends the program that writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; what is there in the end, and on the disk, takes its place.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:  # half a file would take the room that a full disk lacks
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a whole file at once.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(path) as partial:
        partial.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Forces names in a folder onto the disk (POSIX; Windows cannot open a folder)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
