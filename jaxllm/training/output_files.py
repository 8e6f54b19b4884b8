"""Files of a run that are there as a whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxllm.common import atomic_file as whole_file
from jaxllm.common.errors import RunError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Says which file cannot be written.

    Raises:
        RunError: the disk is full, the folder is read-only, ...
    """
    try:
        yield
    except OSError as failure:
        raise RunError(f"{path}: cannot be written ({failure.strerror or failure})") from failure


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; what is there in the end takes the place of `path`.

    Raises:
        RunError: it cannot be written.
    """
    with writing(path), whole_file.replacing(path) as half:
        yield half


def write_text(path: Path, text: str) -> None:
    """Writes a whole file at once.

    Raises:
        RunError: it cannot be written.
    """
    with replacing(path) as half:
        half.write_text(text, encoding="utf-8")
