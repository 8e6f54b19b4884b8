"""Atomic file writes: readers see the old file or the new one, also after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from jaxllm.common.errors import CheckpointError, naming_file


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Gives a temporary path to write to, and renames it to `path` on success, after fsync.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:  # frees the space of a partial file, which a full disk needs
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically.

    Raises:
        OSError: the file cannot be written; `path` is unchanged.
    """
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file of a checkpoint atomically, with sorted keys.

    Raises:
        CheckpointError: the file cannot be written; `path` is unchanged.
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with naming_file(path, CheckpointError, "written"):
        write_whole(path, text.encode("utf-8"))


def make_folder(path: Path) -> None:
    """Creates the folder of a checkpoint, and those above it, unless it exists.

    Raises:
        CheckpointError: it cannot be created.
    """
    with naming_file(path, CheckpointError, "created"):
        path.mkdir(parents=True, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk (POSIX only: Windows cannot open a folder)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
