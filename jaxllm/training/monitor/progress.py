"""Training progress: a bar on a terminal, plain lines elsewhere; tokens per second and MFU."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxllm.common.compiling import CompileClock
from jaxllm.common.progress import PLAIN_SECONDS, duration
from jaxllm.training.monitor.flops import Peak

LINE_EVERY = 10
QUIET_SECONDS = PLAIN_SECONDS
"""Maximum time between two lines while steps finish or programs compile."""
WINDOW = 20
"""Steps over which speeds are averaged."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """Averages over the last steps; None if unknown."""

    tokens_per_second: float | None = None
    """Tokens without padding."""
    mfu: float | None = None
    """Model FLOPs utilisation: share of the devices' peak, from 0 to 1."""
    seconds_per_step: float | None = None

    def metrics(self) -> dict[str, float]:
        """Fields for the metrics log, without unknown ones."""
        named = {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}
        return {name: value for name, value in named.items() if value is not None}

    @staticmethod
    def of(steps: Collection[tuple[float, int, float | None]], peak: Peak | None) -> Speed:
        """The speed of steps, from the seconds, tokens and model FLOPs of each.

        >>> Speed.of([(0.5, 100, 1e8)], Peak(1e9, "an example"))
        Speed(tokens_per_second=200.0, mfu=0.2, seconds_per_step=0.5)
        """
        seconds = sum(step[0] for step in steps)
        if seconds <= 0:
            return Speed()
        flops = [step[2] for step in steps if step[2] is not None]
        mfu = None
        if peak is not None and len(flops) == len(steps):
            mfu = sum(flops) / seconds / peak.flops
        return Speed(
            tokens_per_second=sum(step[1] for step in steps) / seconds,
            mfu=mfu,
            seconds_per_step=seconds / len(steps),
        )


class TrainingProgress:
    """Shows steps, loss, speed and remaining time on stderr; a context manager.

    Time inside `phase` (evaluating, saving) does not count as training.

    Args:
        total: step at which the run stops.
        start: step at which it resumes.
        peak: peak FLOP/s of the devices, for the MFU; None: no MFU.
        every: steps between lines if stderr is not a terminal. The first and the last step also
            have a line, as does any step that ends ten seconds after the last line.
        evaluations_after: number of evaluations after a step, for the remaining time.
        quiet: show nothing; `step` still returns speeds.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        peak: Peak | None = None,
        every: int = LINE_EVERY,
        evaluations_after: Callable[[int], int] = lambda step: 0,
        quiet: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total, self._start, self._every, self._now = total, start, max(every, 1), now
        self._console = console or Console(
            stderr=True, quiet=quiet, highlight=False, soft_wrap=True
        )
        self._peak, self._evaluations_after = peak, evaluations_after
        # Steps that compiled are left out: they do not predict the time of later steps.
        self._steps: deque[tuple[float, int, float | None]] = deque(maxlen=WINDOW)
        self._evaluation_seconds: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._say_what_compiles, daemon=True)
        self._clock: CompileClock | None = None
        self._compiled = (0, 0.0)
        self._since = self._said = now()
        self._moving = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[line]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._moving.add_task(
            "training", total=total, completed=start, line="compiling"
        )

    def __enter__(self) -> TrainingProgress:
        self._clock = CompileClock()
        self._moving.start()
        self._since = self._now()
        if not self._console.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._moving.stop()
        if self._clock is not None:
            self._clock.close()

    def _say_what_compiles(self) -> None:
        while not self._ended.wait(QUIET_SECONDS):
            if self._clock is not None and (started := self._clock.started) is not None:
                self.say(f"compiling, {time.monotonic() - started:.0f} s so far")

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self._console.print(line, markup=False, style="dim")

    @contextlib.contextmanager
    def phase(self, doing: str, *, says: bool = True) -> Generator[None]:
        """Context for work other than training steps.

        Args:
            says: print its time at the end; it is part of an evaluation.
        """
        start = self._now()
        self._moving.update(self._task, description=doing)
        try:
            yield
            if says:
                self._evaluation_seconds[doing] = self._now() - start
                self.say(f"{doing}: {self._now() - start:.1f} s")
        finally:
            self._since += self._now() - start
            # Its compilations are not counted for the next step.
            self._compiled = self._count_compiled()
            self._moving.update(self._task, description="training")

    def step(
        self,
        step: int,
        *,
        loss: float,
        tokens: int,
        flops: float | None = None,
        shown: Mapping[str, float] | None = None,
    ) -> Speed:
        """Shows a finished step, and returns the speed over the last steps.

        Args:
            step: its number, from `start` + 1 to `total`.
            loss: loss of the step.
            tokens: tokens of its batch without padding; see `flops.TokenCounts`.
            flops: model FLOPs; see `flops.model_flops`. None: no MFU.
            shown: further numbers for the line, such as the learning rate.
        """
        now = self._now()
        seconds, self._since = now - self._since, now
        programs, compiling = self._count_compiled()
        new_programs = programs - self._compiled[0]
        if new_programs:
            self.say(
                f"compiling: {compiling - self._compiled[1]:.1f} s for {new_programs} "
                f"program{'s' if new_programs > 1 else ''} in step {step}"
            )
        else:
            self._steps.append((seconds, tokens, flops))
        self._compiled = (programs, compiling)
        speed = Speed.of(self._steps, self._peak)
        evaluations = self._evaluations_after(step) * sum(self._evaluation_seconds.values())
        line = progress_text(loss, speed, max(self._total - step, 0), shown or {}, evaluations)
        self._moving.update(self._task, completed=step, line=f"step {step}/{self._total}  {line}")
        regular = step % self._every == 0 or step in (self._start + 1, self._total)
        if (regular or now - self._said >= QUIET_SECONDS) and not self._console.is_terminal:
            self.say(f"step {step}/{self._total}  {line}")
            self._said = now
        return speed

    def _count_compiled(self) -> tuple[int, float]:
        return (0, 0.0) if self._clock is None else (self._clock.programs, self._clock.seconds)


def progress_text(
    loss: float,
    speed: Speed,
    steps_left: int,
    shown: Mapping[str, float],
    evaluation_seconds: float = 0.0,
) -> str:
    """Formats the line of a step; `evaluation_seconds` is the time of the evaluations to come.

    >>> progress_text(2.5, Speed(1234.5, 0.31, 0.5), 60, {"lr": 1e-4})
    'loss 2.5000  lr 0.0001  1,234 tokens/s  MFU 31.0%  ETA 0:30'
    """
    parts = [f"loss {loss:.4f}", *(f"{name} {value:.4g}" for name, value in shown.items())]
    if speed.tokens_per_second is not None:
        parts.append(f"{speed.tokens_per_second:,.0f} tokens/s")
    if speed.mfu is not None:
        parts.append(f"MFU {speed.mfu:.1%}")
    if speed.seconds_per_step is not None and steps_left:
        seconds = steps_left * speed.seconds_per_step + evaluation_seconds
        parts.append(f"ETA {duration(seconds)}")
    return "  ".join(parts)
