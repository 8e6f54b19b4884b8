"""Counts JAX compilations and their seconds."""

from __future__ import annotations

import time

import jax.monitoring


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
