"""Checks of arguments that public functions share: paths, lists, and values of one type."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from jaxllm.common.errors import InputError, quoted
from jaxllm.common.files import expanded

P = ParamSpec("P")
T = TypeVar("T")


def checked_path(path: str | PathLike[str], name: str) -> Path:
    """A path with ``~`` expanded.

    >>> checked_path(3, "folder")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: folder: expected a path, found 3 (int)
    """
    return expanded(checked(path, (str, PathLike), name, "a path"))


def checked_iterable(values: Iterable[T], name: str, expected: str = "a list") -> Iterable[T]:
    """An iterable that is no text, mapping or data frame.

    Iterating over those gives characters, keys or names of columns.

    >>> checked_iterable("Hello", "rows", "a list of prompts")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: rows: expected a list of prompts, found Hello (str)
    """
    if hasattr(values, "columns"):
        raise InputError(
            f"{name}: expected {expected}, found a {type(values).__name__}; pass one of its "
            "columns, or use BatchGenerator.generate_table"
        )
    with contextlib.suppress(TypeError):  # None, a number, an array without axes
        iter(values)
        if not isinstance(values, str | bytes | Mapping):
            return values
    return checked(values, (), name, expected)


def names_in(text: str) -> tuple[str, ...] | Literal["all"]:
    """Names of columns in a text.

    >>> names_in("ticket, lang"), names_in("all")
    (('ticket', 'lang'), 'all')
    """
    return "all" if text == "all" else tuple(name.strip() for name in text.split(","))


def checked_list(values: Iterable[T], name: str) -> list[T]:
    """`checked_iterable` as a list."""
    return list(checked_iterable(values, name))


def checked_function(value: T, name: str) -> T:
    """The value, which must be callable."""
    if not callable(value):
        raise InputError(f"{name}: expected a function, found {quoted(value)}")
    return value


def checked(value: Any, types: tuple[type, ...], name: str, expected: str) -> Any:
    """The value, an instance of one of `types`.

    Raises:
        InputError: it is of another type; `expected` says in words what is needed.
    """
    if not isinstance(value, types):
        text = quoted(value).strip("'")
        raise InputError(f"{name}: expected {expected}, found {text} ({type(value).__name__})")
    return value


def checks_flags(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: parameters annotated ``bool``, or ``bool | None``, take nothing else.

    A text such as "no" would count as true, and the truth of an array is a ValueError.

    >>> @checks_flags
    ... def decode(ids: list[int], skip_special_tokens: bool = False) -> str: ...
    >>> decode([1], skip_special_tokens="no")
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: skip_special_tokens: expected True or False, found no (str)
    """
    flags: dict[str, tuple[int, tuple[type, ...]]] = {}
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        annotation = getattr(parameter.annotation, "__name__", str(parameter.annotation))
        if annotation in ("bool", "bool | None"):
            types = (bool, np.bool_) if annotation == "bool" else (bool, np.bool_, type(None))
            flags[parameter.name] = position, types

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, (position, types) in flags.items():
            if name in kwargs:
                checked(kwargs[name], types, name, "True or False")
            elif position < len(args):
                checked(args[position], types, name, "True or False")
        return function(*args, **kwargs)

    return call
