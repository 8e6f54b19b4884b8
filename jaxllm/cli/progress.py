"""Progress messages of commands, on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


class Update(Protocol):
    """Progress callback of a phase; `jaxllm.load` takes it as ``progress``."""

    def __call__(self, name: str, done: int, total: int, /) -> None: ...


class Reporter:
    """Prints phases and their durations: a spinner on a terminal, one plain line each elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    @property
    def console(self) -> Console:
        return self._console

    def table(self, lines: Sequence[tuple[str, str]]) -> None:
        """Prints names and values in two columns."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in lines:
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(table)

    def say(self, line: str) -> None:
        """Prints one line, without markup."""
        self._console.print(line, markup=False, style="dim")

    @contextlib.contextmanager
    def phase(self, label: str) -> Generator[Update]:
        """Shows a running phase, and prints its duration if it succeeds."""
        start = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        spinner = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
        if not self._console.is_terminal:
            spinner.disable = True
        with spinner:
            task = spinner.add_task(label, total=None)

            def update(name: str, done: int, total: int, /) -> None:
                spinner.update(
                    task, description=f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
                )

            yield update
        self.say(f"{label}: {time.perf_counter() - start:.1f} s")
