"""Progress of a batch job on stderr."""

from __future__ import annotations

import threading
import time
from typing import Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from jaxllm.batch.job.job import Job
from jaxllm.batch.job.streamed_job import StreamedJob
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.progress import PLAIN_SECONDS, Reporter


class BatchProgress:
    """Progress of a job: a bar on a terminal, a plain line every half minute elsewhere.

    A context manager. What it shows is true while a program is compiled, too: the bar and the
    lines are updated by a thread, not by finished rows.
    """

    def __init__(self, reporter: Reporter, job: Job | StreamedJob, clock: CompileClock) -> None:
        self._reporter, self._job, self._clock = reporter, job, clock
        self._is_terminal = reporter.console.is_terminal
        self._bar = Progress(
            _StatusColumn(self),
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

    def status(self) -> str:
        """Speeds and remaining time, compilation and rows with errors excluded."""
        counts = self._job.engine.counts
        compile_seconds = self._clock.seconds_so_far - self._earlier_compile_seconds
        compiling = f"compiling {compile_seconds:.1f} s"
        errors = counts.errors.total()
        rows = counts.answered
        parts = [compiling] if self._clock.started is not None else []
        if rows:
            seconds = max(time.monotonic() - self._start - compile_seconds, 1e-9)
            parts += [
                f"{rows / seconds:.1f} rows/s, {counts.prompt_tokens / seconds:.0f} prompt and "
                f"{counts.new_tokens / seconds:.0f} new tokens/s",
                *([] if parts else [compiling]),
                f"{left(seconds, counts.work_done, counts.work)} left",
            ]
        elif not parts:
            parts = ["decoding" if counts.program_calls else "preparing", compiling]
        if errors:
            parts.append(f"{errors} errors")
        return ", ".join(parts)


class _StatusColumn(ProgressColumn):
    """The status, rendered whenever the bar is drawn."""

    def __init__(self, progress: BatchProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress.status())


def left(seconds: float, tokens_done: int, tokens: int) -> str:
    """Estimates the remaining time, assuming that rows end as early before their limits as so far.

    >>> left(60.0, 100, 400), left(60.0, 0, 400)
    ('3:00', '?')
    """
    if not tokens_done:
        return "?"
    rest = round(seconds * (tokens - tokens_done) / tokens_done)
    hours, minutes = divmod(rest // 60, 60)
    return f"{hours}:{minutes:02}:{rest % 60:02}" if hours else f"{minutes}:{rest % 60:02}"
