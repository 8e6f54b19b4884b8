"""What a command says on stderr while the user waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text


class Update(Protocol):
    """Called while a phase goes on; the hook that ``jaxllm.load`` takes as ``progress``."""

    def __call__(self, name: str, done: int, total: int, /) -> None: ...


class Reporter:
    """Phases with their seconds: a moving line on a terminal, one plain line each elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    @property
    def console(self) -> Console:
        return self._console

    def table(self, lines: Sequence[tuple[str, str]]) -> None:
        """Names and values in two columns."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in lines:
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(table)

    def say(self, line: str) -> None:
        """One line, exactly as given."""
        self._console.print(line, markup=False, style="dim")

    @contextlib.contextmanager
    def phase(self, doing: str) -> Iterator[Update]:
        """Show that something goes on; when it ends well, how long it took."""
        start = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        moving = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
        if not self._console.is_terminal:
            moving.disable = True
        with moving:
            task = moving.add_task(doing, total=None)

            def update(name: str, done: int, total: int, /) -> None:
                moving.update(
                    task, description=f"{doing}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
                )

            yield update
        self.say(f"{doing}: {time.perf_counter() - start:.1f} s")
