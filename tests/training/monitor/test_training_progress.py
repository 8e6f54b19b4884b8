"""Lines and speeds of training, by a clock that the test winds."""

from __future__ import annotations

import io
import re
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxllm.training.monitor import progress as training_progress
from jaxllm.training.monitor.flops import Peak
from jaxllm.training.monitor.progress import TrainingProgress


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def compile_something() -> None:
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(3)).block_until_ready()


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with TrainingProgress(25, peak=Peak(1e6, "test"), every=10, now=clock) as progress:
        for step in range(1, 26):
            clock.seconds += 0.5
            speed = progress.step(step, loss=3.0, tokens=50, flops=1e5, shown={"lr": 1e-4})
            assert speed.metrics() == {"tokens_per_second": 100.0, "mfu": pytest.approx(0.2)}
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    starts = [line.split("  ")[0] for line in lines]
    assert starts == ["step 1/25", "step 10/25", "step 20/25", "step 25/25"]
    middle = "  loss 3.0000  lr 0.0001  100 tokens/s  MFU 20.0%"
    assert lines[2] == f"step 20/25{middle}  ETA 0:02"
    assert lines[3] == f"step 25/25{middle}"


def test_slow_steps_have_lines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with TrainingProgress(50, every=10, now=clock) as progress:
        for step in range(1, 21):
            clock.seconds += 4 if step < 15 else 1
            progress.step(step, loss=3.0, tokens=50)
    starts = [line.split("/")[0] for line in capsys.readouterr().err.splitlines()]
    assert starts == [f"step {n}" for n in (1, 4, 7, 10, 13, 20)]


def test_the_remaining_time_includes_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def evaluations_after(step: int) -> int:
        return (40 - step) // 10

    with TrainingProgress(40, every=10, evaluations_after=evaluations_after, now=clock) as progress:
        for step in range(1, 21):
            clock.seconds += 1
            progress.step(step, loss=3.0, tokens=50)
            if step == 10:
                with progress.phase("evaluating"):
                    clock.seconds += 30
    lines = capsys.readouterr().err.splitlines()
    assert "ETA 0:30" in lines[1]  # no evaluation has been measured
    assert lines[-1].endswith("ETA 1:20")  # 20 steps and 2 evaluations


def test_long_compilations_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_progress, "QUIET_SECONDS", 0.01)
    with TrainingProgress(2) as progress:
        assert progress._clock is not None
        progress._clock.started = time.monotonic() - 75
        time.sleep(0.2)
        progress._clock.started = None
    assert "compiling, 75 s so far" in capsys.readouterr().err


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with TrainingProgress(2, quiet=True, now=clock) as progress:
        with progress.phase("evaluating"):
            progress.say("something")
        clock.seconds += 1
        assert progress.step(1, loss=1.0, tokens=7).tokens_per_second == 7
    assert capsys.readouterr() == ("", "")


def test_compiling_is_announced_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with TrainingProgress(3, now=clock) as progress:
        compile_something()
        clock.seconds += 60
        assert progress.step(1, loss=1.0, tokens=10).tokens_per_second is None
        clock.seconds += 1
        assert progress.step(2, loss=1.0, tokens=10).tokens_per_second == 10
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"compiling: \d+\.\d s for \d programs? in step 1", lines[0])
    assert lines[1] == "step 1/3  loss 1.0000"
    assert "compiling" not in "".join(lines[1:])


def test_phases_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with TrainingProgress(3, start=1, now=clock) as progress:
        clock.seconds += 1
        progress.step(2, loss=1.0, tokens=10)
        with progress.phase("evaluating [all]"):
            compile_something()
            clock.seconds += 30
        clock.seconds += 1
        assert progress.step(3, loss=1.0, tokens=10).tokens_per_second == 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "evaluating [all]: 30.0 s"
    assert [line.split("  ")[0] for line in lines] == ["step 2/3", lines[1], "step 3/3"]


def test_a_failing_phase_claims_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TrainingProgress(3)
    with pytest.raises(ValueError, match="broken"), progress, progress.phase("saving"):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    clock = Clock()
    with TrainingProgress(50, console=console, now=clock) as progress:
        for step in range(1, 51):
            clock.seconds += 0.01
            progress.step(step, loss=2.5, tokens=10)
        progress._moving.refresh()
    shown = screen.getvalue()
    assert "step 50/50  loss 2.5000  1,000 tokens/s" in shown
    assert "━" in shown


def test_only_recent_steps_count() -> None:
    clock = Clock()
    with TrainingProgress(70, quiet=True, now=clock) as progress:
        for step in range(1, 71):
            clock.seconds += 10.0 if step <= 50 else 1.0
            speed = progress.step(step, loss=1.0, tokens=1 if step <= 50 else 100)
    assert (speed.tokens_per_second, speed.seconds_per_step, speed.mfu) == (100.0, 1.0, None)
