"""Progress messages on stderr, and the compile clock."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest

from jaxllm.cli.progress import Reporter
from jaxllm.common.compile_clock import CompileClock


def test_phase_prints_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter().phase("loading [red]x[/red].gguf") as update:
        update("tensor", 5_000_000, 10_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"loading \[red\]x\[/red\]\.gguf: \d+\.\d s\n", err)


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

    def compile_one(number: int) -> None:
        jax.jit(lambda x: x * number + number)(x).block_until_ready()

    compile_one(1)
    with contextlib.closing(CompileClock()) as clock:
        compile_one(2)
    assert (clock.programs, clock.cached) == (1, 0)
    assert clock.seconds > 0
    compile_one(3)
    assert clock.programs == 1, "closed"


def test_compile_clock_runs_while_a_program_is_compiled() -> None:
    with contextlib.closing(CompileClock()) as clock:
        lowered = jax.jit(lambda x: x * 7 - 3).lower(jnp.arange(5))
        assert clock.started is not None
        assert clock.seconds_so_far > clock.seconds
        lowered.compile()
        assert clock.started is None
        assert clock.seconds_so_far == clock.seconds
