"""metrics.jsonl and metrics.csv: strict, contiguous, and whole after kills and resumes."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.common.errors import InputError, RunError
from jaxllm.training.monitor.metrics_log import MetricsLog, read_metrics


def strict(path: Path) -> list[dict]:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write(folder: Path, steps: range, resume_at: int | None = None) -> None:
    with MetricsLog(folder, resume_at=resume_at) as log:
        for step in steps:
            log.log(step, {"loss": step / 4})


def steps(folder: Path) -> list[int]:
    actual = [row["step"] for row in strict(folder / "metrics.jsonl")]
    assert [int(row["step"]) for row in table(folder)] == actual
    return actual


def test_each_step_writes_its_line_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "run") as log:
        log.log(1, {"loss": jnp.float32(2.5), "lr": np.float64(1e-4), "tokens": np.int32(7)})
        log.log(2, {"loss": jnp.bfloat16(0.5), "lr": 2e-4, "tokens": 8, "note": 'a, "b"\nc'})
        # Before it is closed:
        assert strict(log.path) == [
            {"step": 1, "loss": 2.5, "lr": 1e-4, "tokens": 7},
            {"step": 2, "loss": 0.5, "lr": 2e-4, "tokens": 8, "note": 'a, "b"\nc'},
        ]
        first, second = table(tmp_path / "run")
    assert (first["loss"], first["tokens"], first["note"]) == ("2.5", "7", "")
    assert second["note"] == 'a, "b"\nc'


def test_columns_do_not_depend_on_the_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(1, {"loss": 3.0})
        log.log(2, {"loss": 2.0, "eval_loss": 2.5})
        log.log(3, {"eval_rouge1": 0.5, "loss": 1.0})
        log.log(4, {"loss": 0.5})
    rows = table(tmp_path)
    assert [list(row) for row in rows] == [["step", "loss", "eval_loss", "eval_rouge1"]] * 4
    assert [row["eval_loss"] for row in rows] == ["", "2.5", "", ""]
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "1.0", "0.5"]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(1, {"loss": float("nan"), "grad_norm": jnp.float32(np.inf), "lr": -math.inf})
    assert strict(log.path) == [
        {
            "step": 1,
            "loss": None,
            "grad_norm": None,
            "lr": None,
            "nonfinite": {"loss": "nan", "grad_norm": "inf", "lr": "-inf"},
        }
    ]
    (row,) = read_metrics(log.path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["lr"]) == (math.inf, -math.inf)
    (cells,) = table(tmp_path)
    assert cells == {"step": "1", "loss": "nan", "grad_norm": "inf", "lr": "-inf"}


def test_gaps_duplicates_and_other_types_are_refused(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.log(1, {"loss": 1.0})
        for step in (1, 3):
            with pytest.raises(InputError, match=f"expected 2 after 1, found {step}"):
                log.log(step, {"loss": 1.0})
        with pytest.raises(InputError, match=r"metrics\['loss'\].*shape \(2,\)"):
            log.log(2, {"loss": np.ones(2)})
        with pytest.raises(InputError, match=r"metrics\['step'\]"):
            log.log(2, {"step": 2})
        log.log(2, {"loss": 1.0})
    assert steps(tmp_path) == [1, 2]


def test_a_new_run_does_not_touch_another(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"metrics\.jsonl: holds the steps of another run"):
        MetricsLog(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("resume_at", [1, 4, 6])
def test_resume_cuts_what_comes_again(tmp_path: Path, resume_at: int) -> None:
    write(tmp_path, range(1, 7))
    write(tmp_path, range(resume_at + 1, 10), resume_at=resume_at)
    assert steps(tmp_path) == list(range(1, 10))


def test_resume_before_the_first_step(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    write(tmp_path, range(1, 3), resume_at=0)
    assert steps(tmp_path) == [1, 2]


def test_before_the_first_step_there_is_step_0(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    write(tmp_path, range(2), resume_at=0)
    assert steps(tmp_path) == [0, 1]
    write(tmp_path, range(1, 4), resume_at=0)
    assert steps(tmp_path) == [1, 2, 3]


def test_the_last_line_is_amended(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[:2]
    with MetricsLog(tmp_path, resume_at=3) as log:
        with pytest.raises(InputError, match="expected the last one, 3, found 2"):
            log.amend(2, {"eval_loss": 1.0})
        log.amend(3, {"eval_loss": math.inf})
        log.log(4, {"loss": 0.5})
    actual = read_metrics(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:2] == first
    assert [row["step"] for row in actual] == [1, 2, 3, 4]
    assert actual[2]["eval_loss"] == math.inf
    assert "loss" in actual[2]
    assert [row["eval_loss"] for row in table(tmp_path)] == ["", "", "inf", ""]


def test_a_line_that_was_moved_away_is_made(tmp_path: Path) -> None:
    for begin in (None, '{"step": 7}\n'):
        if begin:
            (tmp_path / "metrics.jsonl").write_text(begin)
        with MetricsLog(tmp_path, resume_at=4) as log:
            log.amend(4, {"eval_loss": 1.0})
            log.log(5, {"loss": 0.5})
        assert steps(tmp_path) == [4, 5]


def test_a_log_that_was_moved_away_starts_anew(tmp_path: Path) -> None:
    write(tmp_path, range(5, 7), resume_at=4)
    write(tmp_path, range(6, 8), resume_at=5)
    assert steps(tmp_path) == [5, 6, 7]


def test_every_tear_is_repaired(tmp_path: Path) -> None:
    """Whatever part of line 3 a kill left, a run resumed at step 2 goes on."""
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    full = path.read_bytes()
    start = full.rstrip(b"\n").rindex(b"\n") + 1
    for end in range(start, len(full) + 1):
        path.write_bytes(full[:end])
        write(tmp_path, range(3, 5), resume_at=2)
        assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_last_line_without_its_end_counts(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    write(tmp_path, range(4, 6), resume_at=3)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"step": 1}\n{"step": 3}\n{"step": 4}\n', "line 2: step 3 after step 1"),
        ('{"step": 1}\n{"step": 1}\n{"step": 2}\n', "line 2: step 1 after step 1"),
        ('{"step": 1}\n{"ste\n{"step": 3}\n', "line 2: not JSON"),
        ('{"step": 1}\n[]\n{"step": 3}\n', "line 2: expected an object"),
        ('{"step": 1, "nonfinite": 3}\n', "line 1: nonfinite: expected fields"),
        ('{"step": 1, "nonfinite": {"loss": []}}\n', "line 1: nonfinite: expected fields"),
        ('{"step": 1}\n{"step": 2}\n', "ends with step 2, but the checkpoint is of step 3"),
        ('{"step": 1}\n{"step": 2}\n{"step"', "ends with step 2, but the checkpoint is of step 3"),
    ],
)
def test_what_cannot_be_repaired_is_named(tmp_path: Path, broken: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(broken)
    with pytest.raises(RunError, match=message):
        MetricsLog(tmp_path, resume_at=3)


KILLED = """
import os, signal, sys
from jaxllm.training.monitor.metrics_log import MetricsLog
log = MetricsLog(sys.argv[1])
for step in range(1, 8):
    log.log(step, {"loss": step / 4} | ({"eval_loss": 1.0} if step == 5 else {}))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ci
def test_a_kill_loses_no_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert steps(tmp_path) == list(range(1, 8))
    write(tmp_path, range(7, 9), resume_at=6)
    assert steps(tmp_path) == list(range(1, 9))
    assert list(table(tmp_path)[0]) == ["step", "loss", "eval_loss"]


FULL = """
import resource, sys
from jaxllm.common.errors import RunError
from jaxllm.training.monitor.metrics_log import MetricsLog

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with MetricsLog(sys.argv[1]) as log:
    for step in range(1, 1000):
        try:
            log.log(step, {"loss": 1 / step})
        except RunError as error:
            sys.exit(f"{step} {error}")
"""


@pytest.mark.ci
def test_a_full_disk_is_an_error_that_a_resume_repairs(tmp_path):
    # -B: of a module that it imports Python would keep the bytes that the limit lets through.
    done = subprocess.run(
        [sys.executable, "-B", "-c", FULL, str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 1
    failed, _, message = done.stderr.partition(" ")
    step = int(failed) - 1
    expected = f"{tmp_path}: the metrics of step {failed} cannot be written (File too large)\n"
    assert message == expected
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    with MetricsLog(tmp_path, resume_at=step) as log:
        log.log(step + 1, {"loss": 0.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        *range(1, step + 2)
    ]
