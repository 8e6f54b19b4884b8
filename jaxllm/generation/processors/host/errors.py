"""Exceptions of Python functions that a compiled program calls, brought back to who called it.

JAX turns such an exception into one of its own (a JaxRuntimeError or a ValueError), which holds a
traceback as text. Here the exception itself is kept under a number that the text shows, and raised
again.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from jaxllm.common.errors import UnsupportedError
from jaxllm.parallel.sharding import context_mesh

P = ParamSpec("P")
T = TypeVar("T")

_KEPT = 16
_FAILURES: OrderedDict[int, Exception] = OrderedDict()
_NUMBERS = itertools.count()
_MARK = re.compile(r"\(host failure (\d+)\)")
_LOGGER = logging.getLogger("jax._src.callback")  # prints each failed callback's traceback


class HostError(Exception):
    """A function of the host failed; the text ends with the number of what it raised."""


def check_one_device() -> None:
    """Where a program that calls Python is traced: it must run on one device.

    On several, the one that calls Python and those that wait for it in a sum may block each other.

    Raises:
        UnsupportedError: a mesh of several devices is around it.
    """
    mesh = context_mesh()
    if mesh is not None and mesh.size > 1:
        raise UnsupportedError(
            "logits_processor, stopping_criteria, prefix_allowed_tokens_fn: Python functions and "
            f"grammars cannot run in programs of several devices (mesh {dict(mesh.shape)}); load "
            "the model without mesh="
        )


def noted(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose exceptions :func:`reraised` finds again."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as failure:
            number = next(_NUMBERS)
            _FAILURES[number] = failure
            while len(_FAILURES) > _KEPT:
                _FAILURES.popitem(last=False)
            raise HostError(f"{failure} (host failure {number})") from failure

    return call


@contextmanager
def reraised() -> Iterator[None]:
    """Within it, a program that fails by a :func:`noted` function raises what that one raised.

    The program must be run to its end inside, for example by fetching its result.
    """
    _LOGGER.addFilter(_of_jax)
    try:
        yield
    except Exception as error:
        mark = _MARK.search(str(error))
        failure = _FAILURES.pop(int(mark[1]), None) if mark else None
        if failure is None:
            raise
        raise failure from None
    finally:
        _LOGGER.removeFilter(_of_jax)


def _of_jax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HostError))
