"""Progress messages on stderr, or in a notebook's cell: phases, and the programs that compile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import jax.monitoring
import jax.numpy
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxllm.common.arguments import checks_flags

PLAIN_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class Update(Protocol):
    """Progress callback of a phase; `jaxllm.load` takes it as ``progress``."""

    def __call__(self, name: str, done: int, total: int, /) -> None: ...


def megabytes(done: int, total: int) -> str:
    """What is done of a number of bytes, in words.

    >>> megabytes(2_000_000, 5_000_000)
    '2 of 5 MB'
    """
    return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """A time as people write it.

    >>> duration(180.2), duration(3725), duration(200000)
    ('3:00', '1:02:05', '2d 7:33:20')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    start = f"{days}d " if days else ""
    return f"{start}{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"


class Reporter:
    """Prints phases and their durations: a spinner on a terminal, one plain line each elsewhere.

    Args:
        quiet: prints nothing.
        least_seconds: shorter phases print no line when they end.
    """

    def __init__(self, *, quiet: bool = False, least_seconds: float = 0.0) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
        self._least_seconds = least_seconds
        # Not in a notebook: rich needs ipywidgets there, and leaves an empty output for each line.
        self._is_animated = self.console.is_terminal
        self._spinner: Progress | None = None
        self.compile_seconds = 0.0
        """Seconds of compiling that were reported, beside those of phases."""

    def table(self, lines: Sequence[tuple[str, str]]) -> None:
        """Prints names and values in two columns."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in lines:
            table.add_row(Text(name, style="dim"), Text(value))
        self.console.print(table)

    def say(self, line: str) -> None:
        """Prints one line, without markup."""
        self.console.print(line, markup=False, style="dim")

    @contextlib.contextmanager
    def phase(
        self, label: str, amounts: Callable[[int, int], str] = megabytes
    ) -> Generator[Update]:
        """Shows a running phase, and prints its duration if it succeeds.

        Compiling that has lines of its own (`CompileReports`) is not counted. `amounts` puts what
        is done, and the total, into words.
        """
        start, compile_seconds = time.perf_counter(), self.compile_seconds
        stop, describe = self.start(label)
        last_line, rate = start, ""

        def update(name: str, done: int, total: int, /) -> None:
            nonlocal last_line, rate
            if amounts is megabytes:
                rate = f", {done / 1e6 / (time.perf_counter() - start):,.0f} MB/s"
            line = f"{label}: {amounts(done, total)}{rate}"
            describe(line)
            if not self._is_animated and time.perf_counter() - last_line >= PLAIN_SECONDS:
                last_line = time.perf_counter()
                self.say(line)

        try:
            yield update
        finally:
            stop()
        compile_seconds = self.compile_seconds - compile_seconds
        seconds = time.perf_counter() - start - compile_seconds
        if seconds + compile_seconds >= self._least_seconds:
            self.say(f"{label}: {seconds:.1f} s{rate}")

    def start(self, label: str) -> tuple[Callable[[], None], Callable[[str], None]]:
        """Starts a line with a spinner; returns functions that end it and change its text.

        A line inside another's time joins its display: a console has one.
        """
        outermost = self._spinner is None
        if self._spinner is None:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
            self._spinner = Progress(
                *columns, TimeElapsedColumn(), console=self.console, transient=True
            )
            self._spinner.disable = not self._is_animated
            self._spinner.start()
        spinner = self._spinner
        task = spinner.add_task(label, total=None)

        def stop() -> None:
            spinner.remove_task(task)
            if outermost:
                spinner.stop()
                self._spinner = None

        return stop, lambda text: spinner.update(task, description=text)


class CompileReports:
    """Reports each program that JAX compiles, until `close`.

    Args:
        reporter: prints the reports.
        least_seconds: programs that compile faster are not reported.
    """

    def __init__(self, reporter: Reporter, least_seconds: float = 0.5) -> None:
        self._reporter = reporter
        self._least_seconds = least_seconds
        self._stop: Callable[[], None] | None = None
        jax.monitoring.register_event_duration_secs_listener(self._duration)

    def _duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        name = _program_name(str(kwargs.get("fun_name", "a program")))
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            self._end()
            self._stop, _ = self._reporter.start(f"compiling {name}")
        elif event == "/jax/core/compile/backend_compile_duration":
            self._end()
            if duration_secs >= self._least_seconds:
                self._reporter.compile_seconds += duration_secs
                self._reporter.say(f"compiled {name}: {duration_secs:.1f} s")

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
            self._stop = None

    def close(self) -> None:
        """Stops reporting."""
        self._end()
        jax.monitoring.unregister_event_duration_listener(self._duration)


def _program_name(function: str) -> str:
    """Name of a program by its function: words for one of the library, and none for JAX's own.

    >>> _program_name("jit(prefill_slots)"), _program_name("_score_batch")
    ('prefill slots', 'score batch')
    >>> _program_name("<lambda>"), _program_name("convert_element_type")
    ('a function', 'a function')
    """
    name = function.removeprefix("jit(").removesuffix(")")
    if name == "<lambda>" or hasattr(jax.lax, name) or hasattr(jax.numpy, name):
        return "a function"
    return name.strip("_").replace("_", " ")


_reports: list[tuple[Reporter, CompileReports | None]] = []
"""The reporter of `set_progress` or `reports_to`, if one is on."""


@checks_flags
def set_progress(on: bool, *, least_seconds: float = 0.5) -> None:
    """Turns progress messages of the library on or off; they are off at first.

    They go to stderr, or to the cell of a notebook (there without a spinner): loading, the programs
    that compile with their seconds (your own jitted functions too), and generating; of many prompts
    the rows and new tokens too, in a line every ten seconds where there is no terminal. What takes
    less than `least_seconds` prints no line. A call in one process of several concerns that process
    alone.
    """
    while _reports:
        _, programs = _reports.pop()
        if programs is not None:
            programs.close()
    if on:
        reporter = Reporter(least_seconds=least_seconds)
        _reports.append((reporter, CompileReports(reporter, least_seconds)))


@contextlib.contextmanager
def reports_to(reporter: Reporter) -> Generator[None]:
    """Shows the phases of the library by the reporter of a command, unless `set_progress` is on or
    the reporter is quiet."""
    if _reports or reporter.console.quiet:
        yield
        return
    _reports.append((reporter, None))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # `set_progress` may have replaced it
            _reports.remove((reporter, None))


def progress_line(line: str) -> None:
    """Prints one line if the library's progress is shown."""
    if _reports:
        _reports[0][0].say(line)


@contextlib.contextmanager
def progress_phase(
    label: str, amounts: Callable[[int, int], str] = megabytes
) -> Generator[Update | None]:
    """A phase of the library: shown if `set_progress` is on; gives None otherwise."""
    if not _reports:
        yield None
        return
    with _reports[0][0].phase(label, amounts) as update:
        yield update
