"""Progress of a batch: rows, tokens a second without compile time, and the time that is left."""

from __future__ import annotations

import time
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxllm.batch.job.job import Job
from jaxllm.cli.progress import Reporter
from jaxllm.common.compile_clock import CompileClock

PLAIN_SECONDS = 30.0
"""Seconds between two lines where there is no terminal."""


class BatchProgress:
    """Shows a progress bar on a terminal, occasional plain lines elsewhere; a context manager."""

    def __init__(self, reporter: Reporter, job: Job, clock: CompileClock) -> None:
        self._reporter, self._job, self._clock = reporter, job, clock
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} rows"),
            TimeElapsedColumn(),
            console=reporter.console,
            transient=True,
            disable=not reporter.console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=len(job.source.lines))
        self._start = self._said = time.monotonic()
        self._compiled = clock.seconds
        self._whose = f" of process 0 of {job.processes}" if job.processes > 1 else ""

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()

    def update(self) -> None:
        """Shows a finished row."""
        done = self._job.resumed + self._job.engine.counts.rows
        total = self._job.resumed + self._job.share
        self._bar.update(self._task, completed=done, total=total, description=self.line())
        if self._whose and done == total:
            self._reporter.say("process 0 has answered its rows; waiting for the others")
        now = time.monotonic()
        if not self._reporter.console.is_terminal and now - self._said > PLAIN_SECONDS:
            self._said = now
            self._reporter.say(f"{done} of {total} rows{self._whose}, {self.line()}")

    def line(self) -> str:
        """Speeds and remaining time, compilation excluded."""
        counts = self._job.engine.counts
        compiling = self._clock.seconds - self._compiled
        seconds = max(time.monotonic() - self._start - compiling, 1e-9)
        return (
            f"{counts.rows / seconds:.1f} rows/s, {counts.prompt_tokens / seconds:.0f} prompt and "
            f"{counts.new_tokens / seconds:.0f} new tokens/s, compiling {compiling:.1f} s, "
            f"{left(seconds, counts.new_token_limit_done, counts.new_token_limit)} left"
        )


def left(seconds: float, answered: int, asked: int) -> str:
    """Estimates the remaining time, assuming that rows end as early before their limits as so far.

    >>> left(60.0, 100, 400), left(60.0, 0, 400)
    ('3:00', '?')
    """
    if not answered:
        return "?"
    rest = round(seconds * (asked - answered) / answered)
    hours, minutes = divmod(rest // 60, 60)
    return f"{hours}:{minutes:02}:{rest % 60:02}" if hours else f"{minutes}:{rest % 60:02}"
