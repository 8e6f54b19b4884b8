"""Progress of requests, and warnings of those that were truncated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from jaxllm.common.errors import warn
from jaxllm.common.progress import Reporter


@contextlib.contextmanager
def counted(reporter: Reporter, label: str, total: int) -> Generator[Callable[[], None]]:
    """Shows how many requests are done; a call of the function that it gives counts one."""
    start, done = time.perf_counter(), 0
    stop, describe = reporter.start(label)

    def advance() -> None:
        nonlocal done
        done += 1
        describe(f"{label}: {done} of {total}")

    try:
        yield advance
    finally:
        stop()
    reporter.say(f"{label}: {total} requests, {time.perf_counter() - start:.1f} s")


def warn_of_truncation(longer: int, total: int, max_length: int) -> None:
    """Warns that `longer` of `total` requests lose tokens, if any do."""
    if longer:
        warn(
            f"{longer} of {total} requests are longer than max_length ({max_length} tokens) and "
            "lose the start of their context"
        )
