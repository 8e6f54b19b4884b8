"""Calls NumPy functions on the host, also from compiled programs, and reraises their exceptions.

JAX replaces an exception of a callback by its own (a JaxRuntimeError or a ValueError), with the
traceback as text. Here the original exception is stored under a number that the text contains, and
reraised.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxllm.common.errors import UnsupportedError
from jaxllm.generation.inputs.values import any_traced
from jaxllm.parallel.sharding import context_mesh

P = ParamSpec("P")
T = TypeVar("T")

_MAX_STORED = 16
_FAILURES: OrderedDict[int, Exception] = OrderedDict()
_NUMBERS = itertools.count()
_FAILURE_NUMBER = re.compile(r"\(host failure (\d+)\)")
_LOGGER = logging.getLogger("jax._src.callback")  # prints each failed callback's traceback


class HostError(Exception):
    """Error of a host function; the message ends with the number of the stored exception."""


def call_on_host(
    function: Callable[..., np.ndarray], result: jax.ShapeDtypeStruct, *arrays: ArrayLike | None
) -> jax.Array:
    """Calls ``function(*arrays)`` with NumPy arrays: at once, or as a callback of a program.

    ``function`` must not call JAX, and must depend on its arguments alone: a program may call it
    twice or not at all. An exception in it ends the program (see :func:`reraise_failures`).

    Raises:
        UnsupportedError: a program on several devices is being traced.
    """
    check_one_device()
    if not any_traced(arrays):
        return jnp.asarray(function(*map(np.asarray, arrays)), result.dtype)
    return jax.pure_callback(record_failures(function), result, *arrays, vmap_method="sequential")


def check_one_device() -> None:
    """Checks, while tracing a program with host callbacks, that it runs on one device.

    On several, a device in a callback and devices waiting for it in an all-reduce may deadlock.

    Raises:
        UnsupportedError: the current mesh has several devices.
    """
    mesh = context_mesh()
    if mesh is not None and mesh.size > 1:
        raise UnsupportedError(
            "logits_processor, stopping_criteria, prefix_allowed_tokens_fn: Python functions and "
            f"grammars cannot run in programs of several devices (mesh {dict(mesh.shape)}); load "
            "the model without mesh="
        )


def record_failures(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that its exceptions are stored for :func:`reraise_failures`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as failure:
            number = next(_NUMBERS)
            _FAILURES[number] = failure
            while len(_FAILURES) > _MAX_STORED:
                _FAILURES.popitem(last=False)
            raise HostError(f"{failure} (host failure {number})") from failure

    return call


@contextmanager
def reraise_failures() -> Generator[None]:
    """Context in which programs raise the exceptions stored by :func:`record_failures`.

    The program must finish inside the context, for example by fetching its result.
    """
    _LOGGER.addFilter(_is_not_ours)
    try:
        yield
    except Exception as error:
        match = _FAILURE_NUMBER.search(str(error))
        failure = _FAILURES.pop(int(match[1]), None) if match else None
        if failure is None:
            raise
        raise failure from None
    finally:
        _LOGGER.removeFilter(_is_not_ours)


def _is_not_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HostError))
