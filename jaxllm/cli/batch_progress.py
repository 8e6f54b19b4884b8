"""Progress of a job: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from typing import Self

from rich.progress import BarColumn, Progress, RenderableColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from jaxllm.batch.job.job import Job, StreamedJob
from jaxllm.common.compiling import CompileClock
from jaxllm.common.progress import PLAIN_SECONDS, Reporter, duration


class BatchProgress:
    """Progress of a job: a bar on a terminal, plain lines elsewhere.

    A context manager. What it shows is true while a program is compiled, too: the bar and the
    lines are updated by a thread, not by finished rows.
    """

    def __init__(self, reporter: Reporter, job: Job | StreamedJob, clock: CompileClock) -> None:
        self._reporter, self._job, self._clock = reporter, job, clock
        self._is_terminal = reporter.console.is_terminal
        self._bar = Progress(
            RenderableColumn(self),  # drawn by `__rich__`
            BarColumn(),
            TextColumn("{task.completed}/{task.total} rows"),
            TimeElapsedColumn(),
            console=reporter.console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task("", total=len(job.source))
        self._start = time.monotonic()
        self._earlier_compile_seconds = clock.seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._say_lines, daemon=True)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        if not self._is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bar.stop()

    def update(self) -> None:
        """Counts a finished row."""
        done, total = self._rows()
        self._bar.update(self._task, completed=done, total=total)

    def _rows(self) -> tuple[int, int]:
        job = self._job
        return job.resumed + job.engine.counts.rows, len(job.source)

    def _say_lines(self) -> None:
        while not self._stopped.wait(PLAIN_SECONDS):
            done, total = self._rows()
            self._reporter.say(f"{done} of {total} rows, {self.status()}")

    def __rich__(self) -> Text:
        return Text(self.status())

    def status(self) -> str:
        """What runs, speeds and the remaining time; compiling does not count as time. Rows that are
        not read yet count as much as the others."""
        counts = self._job.engine.counts
        compile_seconds = self._clock.seconds_so_far - self._earlier_compile_seconds
        seconds = max(time.monotonic() - self._start - compile_seconds, 1e-9)
        parts = []
        if self._clock.started is not None:
            number = len(counts.program_calls) + 1
            of = f"{number} of {max(number, counts.programs)}: " if counts.programs else ""
            parts.append(f"compiling {of}{counts.doing} ({compile_seconds:.0f} s)")
        elif not counts.answered:
            parts.append(counts.doing or "preparing")
        if counts.answered:
            parts.append(f"{counts.answered / seconds:.1f} rows/s")
            parts.append(f"{counts.prompt_tokens / seconds:.0f} prompt tokens/s")
        if counts.decode_steps and not counts.answered:
            parts.append(f"{counts.decode_steps:,} steps, {counts.tokens:,} new tokens")
        if counts.tokens:
            parts.append(f"{counts.tokens / seconds:.0f} new tokens/s")
        if counts.answered:
            unread = len(self._job.source) - self._job.resumed - counts.rows_read
            work = counts.work * (1 + max(unread, 0) / max(counts.rows_read, 1))
            parts.append(f"{left(seconds, counts.work_done, work)} left")
        if errors := counts.errors.total():
            parts.append(f"{errors} errors")
        return ", ".join(parts)


def left(seconds: float, tokens_done: int, tokens: float) -> str:
    """Estimates the remaining time, assuming that rows end as early before their limits as so far.

    >>> left(60.0, 100, 400), left(60.0, 0, 400)
    ('3:00', '?')
    """
    return duration(seconds * (tokens - tokens_done) / tokens_done) if tokens_done else "?"
