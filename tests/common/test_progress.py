"""Progress messages on stderr, and the compile clock."""

from __future__ import annotations

import contextlib
import io
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny
from rich.console import Console

import jaxllm
from jaxllm.common import progress as progress_module
from jaxllm.common.compiling import CompileClock
from jaxllm.common.progress import Reporter, duration, progress_phase, reports_to, set_progress


def test_phase_prints_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter().phase("loading [red]x[/red].gguf") as update:
        update("tensor", 5_000_000, 10_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"loading \[red\]x\[/red\]\.gguf: \d+\.\d s, [\d,]+ MB/s\n", err)


def test_durations() -> None:
    assert [duration(s) for s in (0, 61, 3600, 86400)] == ["0:00", "1:01", "1:00:00", "1d 0:00:00"]


def test_long_lines_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    Reporter().say("word " * 100)
    assert capsys.readouterr().err.count("\n") == 1


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(quiet=True)
    with reporter.phase("loading"):
        reporter.say("something")
    assert capsys.readouterr() == ("", "")


def test_failed_phase_prints_no_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="broken"), Reporter().phase("loading"):
        raise ValueError("broken")
    assert capsys.readouterr().err == ""


def test_compile_clock_counts_programs() -> None:
    x = jnp.arange(3)
    new = secrets.randbits(20)  # constants of programs that no earlier run has kept

    def compile_one(number: int) -> None:
        jax.jit(lambda x: x * number + number)(x).block_until_ready()

    compile_one(new)
    with contextlib.closing(CompileClock()) as clock:
        compile_one(new + 1)
    assert (clock.programs, clock.cached) == (1, 0)
    assert clock.seconds > 0
    compile_one(new + 2)
    assert clock.programs == 1, "closed"


def test_compile_clock_runs_while_a_program_is_compiled() -> None:
    with contextlib.closing(CompileClock()) as clock:
        lowered = jax.jit(lambda x: x * 7 - 3).lower(jnp.arange(5))
        assert clock.started is not None
        assert clock.seconds_so_far > clock.seconds
        lowered.compile()
        assert clock.started is None
        assert clock.seconds_so_far == clock.seconds


@pytest.fixture
def progress() -> Iterator[None]:
    set_progress(True, least_seconds=0.0)
    yield
    set_progress(False)


@pytest.mark.ci
def test_the_library_shows_progress(
    progress: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @jax.jit
    def triple(x: jax.Array) -> jax.Array:
        return x * 3

    tiny.cached("gpt2").save_pretrained(tmp_path)
    model, _ = jaxllm.load(tmp_path)
    model.generate(tiny.ids(2), max_new_tokens=3)
    triple(jnp.arange(3))
    lines = [line for line in capsys.readouterr().err.splitlines() if "convert" not in line]
    text = "\n".join(lines)
    for pattern in (
        rf"loading {tmp_path}: \d+\.\d s",
        r"compiled prefill: \d+\.\d s",
        r"compiled decode: \d+\.\d s",
        r"generating, rows: 2, new tokens: up to 3: \d+\.\d s",
        r"compiled triple: \d+\.\d s",
    ):
        assert re.search(pattern, text), text
    set_progress(False)
    model.generate(tiny.ids(3), max_new_tokens=3)
    assert capsys.readouterr().err == ""


def test_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Reporter().phase("loading") as update:
        update("a", 1_000_000, 3_000_000)
        monkeypatch.setattr(progress_module, "PLAIN_SECONDS", 0)
        update("b", 2_000_000, 3_000_000)
    text = capsys.readouterr().err
    rate = r"[\d,]+ MB/s"
    assert re.fullmatch(rf"loading: 2 of 3 MB, {rate}\nloading: \d\.\d s, {rate}\n", text), text


def test_phases_of_the_library_go_to_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Until the end of the context, unless it is quiet."""
    for quiet in (True, False):
        with reports_to(Reporter(quiet=quiet)), progress_phase("loading") as update:
            assert (update is None) is quiet
    with progress_phase("loading") as update:
        assert update is None
    assert capsys.readouterr().err == "loading: 0.0 s\n"


def test_the_end_of_a_command_leaves_progress_that_was_turned_on(progress: None) -> None:
    set_progress(False)
    with reports_to(Reporter()):
        set_progress(True)
    with progress_phase("loading") as update:
        assert update is not None


def test_phases_do_not_count_compiling_again(
    progress: None, capsys: pytest.CaptureFixture[str]
) -> None:
    [(reporter, reports)] = progress_module._reports
    assert reports is not None
    event = "/jax/core/compile/backend_compile_duration"
    with reporter.phase("generating"):
        time.sleep(0.2)
        reports._duration(event, 0.1875, fun_name="_score_batch")
    text = capsys.readouterr().err
    assert "compiled score batch: 0.2 s" in text
    assert re.search(r"^generating: 0\.0 s$", text, re.MULTILINE), text


def test_phases_share_a_display() -> None:
    """A terminal has room for one: an inner spinner joins the outer one's."""
    reporter = Reporter()
    reporter.console = Console(file=io.StringIO(), force_terminal=True, highlight=False)
    reporter._is_animated = True
    with reporter.phase("outer"):
        with reporter.phase("inner"):
            pass
        with reporter.phase("inner again"):
            pass
    text = reporter.console.file.getvalue()  # type: ignore[attr-defined]
    assert [name in text for name in ("outer", "inner: 0.0 s", "inner again: 0.0 s")] == [True] * 3
