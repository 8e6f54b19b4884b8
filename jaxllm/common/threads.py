"""JAX's settings of one thread in another: each thread has its own default device, for example."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

_SETTINGS = sorted(
    # `thread_guard` forbids that a second thread uses it.
    name
    for name in dir(jax)
    if hasattr(jax.config, f"jax_{name}") and name != "thread_guard"
)
"""Settings of JAX that context managers of the same names change in one thread."""


def with_settings_of_this_thread(function: Callable[P, R]) -> Callable[P, R]:
    """The function for another thread. There it runs under the settings of JAX, and the mesh, of
    the thread that calls `with_settings_of_this_thread`.

    JAX keeps the settings that its context managers change (`jax.default_device`,
    `jax.default_matmul_precision`, `jax.enable_x64`, ...) for each thread.
    """
    settings = {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}
    mesh = jax.sharding.get_mesh()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            # In order: `transfer_guard` changes the settings whose names begin with its own.
            for name, value in settings.items():
                if getattr(jax.config, f"jax_{name}") != value:
                    stack.enter_context(getattr(jax, name)(value))
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            return function(*args, **kwargs)

    return run
