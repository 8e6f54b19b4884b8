"""Checks of arguments that public functions share: paths, lists, and values of one type."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from jaxllm.common.errors import InputError
from jaxllm.common.files import expanded
from jaxllm.common.messages import quoted

T = TypeVar("T")


def checked_path(path: str | PathLike[str], name: str) -> Path:
    """A path with ``~`` expanded.

    >>> checked_path(3, "folder")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: folder: expected a path, found 3 (int)
    """
    return expanded(checked(path, (str, PathLike), name, "a path"))


def checked_iterable(values: Iterable[T], name: str, expected: str = "a list") -> Iterable[T]:
    """An iterable that is no text, bytes or mapping, of which the characters or keys would be read.

    >>> checked_iterable("Hello", "rows", "a list of prompts")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: rows: expected a list of prompts, found Hello (str)
    """
    with contextlib.suppress(TypeError):  # None, a number, an array without axes
        iter(values)
        if not isinstance(values, str | bytes | Mapping):
            return values
    return checked(values, (), name, expected)


def checked_list(values: Iterable[T], name: str) -> list[T]:
    """`checked_iterable` as a list."""
    return list(checked_iterable(values, name))


def checked(value: Any, types: tuple[type, ...], name: str, expected: str) -> Any:
    """The value, an instance of one of `types`.

    Raises:
        InputError: it is of another type; `expected` says in words what is needed.
    """
    if not isinstance(value, types):
        text = quoted(value).strip("'")
        raise InputError(f"{name}: expected {expected}, found {text} ({type(value).__name__})")
    return value
