"""Checks of arguments that public functions share: paths, lists, and values of one type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.common.errors import InputError
from jaxllm.common.messages import quoted

T = TypeVar("T")


def checked_path(path: str | PathLike[str], name: str) -> Path:
    """A path with ``~`` expanded.

    >>> checked_path(3, "folder")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: folder: expected a path, found 3 (int)
    """
    return Path(checked(path, (str, PathLike), name, "a path")).expanduser()


def checked_list(values: Iterable[T], name: str) -> list[T]:
    """A list of an iterable's values; a string, bytes or a mapping is none.

    >>> checked_list("ab", "rows")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: rows: expected a list, found ab (str)
    """
    if isinstance(values, str | bytes | Mapping):
        checked(values, (), name, "a list")
    return list(checked(values, (Iterable,), name, "a list"))


def checked(value: Any, types: tuple[type, ...], name: str, expected: str) -> Any:
    """The value, an instance of one of `types`.

    Raises:
        InputError: it is of another type; `expected` says in words what is needed.
    """
    if not isinstance(value, types):
        text = quoted(value).strip("'")
        raise InputError(f"{name}: expected {expected}, found {text} ({type(value).__name__})")
    return value
