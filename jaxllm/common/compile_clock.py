"""Counts JAX compilations and their seconds."""

from __future__ import annotations

import jax.monitoring


class CompileClock:
    """Listens to JAX's compilation events until `close`.

    Attributes:
        seconds: Time spent compiling.
        programs: Programs compiled or taken from the persistent cache.
        cached: Programs taken from the persistent cache.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.programs = 0
        self.cached = 0
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)

    def _duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += duration_secs
            self.programs += 1

    def _event(self, event: str, **kwargs: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self.cached += 1

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
