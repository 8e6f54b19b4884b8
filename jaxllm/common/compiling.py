"""Compiling: the folder that keeps compiled programs for the next start, and a clock."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Generator
from os import PathLike
from pathlib import Path

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.common.arguments import checked_path
from jaxllm.common.errors import RunError


def cache_folder() -> Path:
    """``$JAXLLM_CACHE_DIR``, or else ``jaxllm`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("JAXLLM_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxllm"


def default_folder() -> Path:
    """``$JAXLLM_CACHE_DIR``, or else ``jaxllm/xla`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    folder = cache_folder()
    return folder if os.environ.get("JAXLLM_CACHE_DIR") else folder / "xla"


def enable_compile_cache(folder: str | PathLike[str] | None = None) -> Path:
    """Keeps all compiled programs in a folder, so that the next start compiles nothing.

    The commands do it too, in the same folder. Programs that are compiled already are not kept.

    Args:
        folder: where to keep them. None: the folder in use, else ``$JAXLLM_CACHE_DIR``, else
            ``jaxllm/xla`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. A folder given to JAX itself
            (``JAX_COMPILATION_CACHE_DIR``) wins.

    Returns:
        The folder that is used.

    Raises:
        RunError: the folder cannot be written.
    """
    current = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    from_environment = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is not None:
        checked_path(folder, "folder")
    path = checked_path(from_environment or folder or current or default_folder(), "folder")
    if str(path) != current:
        try:
            str(path).encode()  # JAX refuses a name that is not UTF-8 when it first compiles
            # Compiled programs are code: no other user may write there.
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except (OSError, RuntimeError, ValueError) as failure:  # the last for a null byte
            reason = getattr(failure, "strerror", None) or failure
            raise RunError(
                f"{path} cannot be written ({reason}): compiled programs are not kept"
            ) from failure
        jax.config.update("jax_compilation_cache_dir", str(path))
        compilation_cache.reset_cache()  # JAX looks for a folder once, when it first compiles
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


@contextlib.contextmanager
def without_compile_cache() -> Generator[None]:
    """Compiles within the context without reading or writing a folder, in all threads.

    For programs of devices that this machine does not have: JAX keeps them, and cannot load them.
    """
    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether it is enabled, when it first compiles
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


class CompileClock:
    """Listens to JAX's compilation events until `close`.

    Attributes:
        seconds: time spent compiling.
        programs: programs compiled or taken from the persistent cache.
        cached: programs taken from the persistent cache.
        started: time (``time.monotonic``) at which XLA began to compile a program; None while it
            does not compile.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.programs = 0
        self.cached = 0
        self.started: float | None = None
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)

    def _duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            self.started = time.monotonic()  # XLA compiles what was lowered just now
        elif event == "/jax/core/compile/backend_compile_duration":
            self.started = None
            self.seconds += duration_secs
            self.programs += 1

    def _event(self, event: str, **kwargs: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.cached += 1

    @property
    def seconds_so_far(self) -> float:
        """`seconds`, with those of the program that is being compiled."""
        started = self.started
        return self.seconds + (0.0 if started is None else time.monotonic() - started)

    def summary(self) -> str:
        """One-line summary, such as ``compiling 3.2 s, 2 of 5 programs from the cache``."""
        return (
            f"compiling {self.seconds:.1f} s, "
            f"{self.cached} of {self.programs} programs from the cache"
        )

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._duration)
        jax.monitoring.unregister_event_listener(self._event)
