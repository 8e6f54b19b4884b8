"""Writes the files of a run atomically, with errors that name the file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from jaxllm.common import files
from jaxllm.common.errors import RunError, naming_file


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Converts an OSError into a RunError that names the file.

    Raises:
        RunError: the disk is full, the folder is read-only, ...
    """
    with naming_file(path, RunError, "written"):
        yield


@contextmanager
def replacing_file(path: Path) -> Generator[Path]:
    """Yields a temporary path beside `path`; the file written there replaces `path` at the end.

    Raises:
        RunError: it cannot be written.
    """
    with writing(path), files.replacing(path) as partial:
        yield partial


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically.

    Raises:
        RunError: it cannot be written.
    """
    with replacing_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing_folder(folder: Path) -> Generator[Path]:
    """Yields a temporary folder beside `folder`, which gets its name at the end.

    Raises:
        RunError: it cannot be written, or `folder` is not empty.
    """
    folder = Path(os.path.realpath(folder))  # unlike resolve(), also of a link to itself
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    try:
        with writing(partial):
            partial.mkdir(parents=True)
        yield partial
        with writing(folder):
            partial.replace(folder)
            files.sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
