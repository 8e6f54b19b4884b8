"""train.py as a person runs it: options, one-line errors, signals, kills and full disks."""

from __future__ import annotations

import csv
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from paths import ROOT
from tiny_runs import measured, saved, write_recipe

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.cli.train import main
from jaxllm.training.run.recipe import read_recipe
from jaxllm.training.run.run import train

EVERY = 8
LONG = 100_000


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in this process."""

    def run(*arguments: object) -> Result:
        try:
            code = main([*map(str, arguments)], "train.py")
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


def small(folder: Path, **changes: Any) -> Path:
    """One program; no average, so that steps are quick and checkpoints small."""
    data = {"path": str(folder / "rows.jsonl"), "format": "text", "max_length": 32, "bucket": None}
    given = {"data": data, "max_steps": 4, "checkpoints": {"every": EVERY}, **changes}
    return write_recipe(folder, **given)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the children's programs: not that of other tests, since they are killed."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def spawn(programs: Path) -> Any:
    """Starts the command in a process of its own, which ends with the test.

    It keeps no bytecode: where files may not grow, Python would keep the half of a module's.
    """
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-B", str(ROOT / "train.py"), *map(str, arguments)],
            env={**os.environ, "JAXLLM_CACHE_DIR": str(programs)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def lines_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process: subprocess.Popen[str], folder: Path, more: int) -> None:
    """Until the process has written so many lines beyond those it found; its end is a failure."""
    began = lines_of(folder)
    while lines_of(folder) < began + more:
        # A process that goes on cuts off what came after its checkpoint.
        began = min(began, lines_of(folder))
        if process.poll() is not None:
            pytest.fail(f"exit code {process.returncode}: {process.communicate()}")
        time.sleep(0.002)


def latest(folder: Path) -> int:
    with RunCheckpoints(folder / "checkpoints", writable=False) as checkpoints:
        return checkpoints.latest() or 0


def straight(recipe: Path, folder: Path, steps: int) -> Path:
    """The same run without an end in between."""
    overrides = {"output_dir": str(folder), "max_steps": steps}
    train(read_recipe(recipe, overrides), quiet=True)
    return folder


def assert_equal_runs(folder: Path, other: Path) -> None:
    assert saved(folder) == saved(other)
    assert measured(folder) == measured(other)
    with (folder / "metrics.csv").open() as table:
        steps = [int(row["step"]) for row in csv.DictReader(table)]
    assert steps == [line["step"] for line in measured(folder)] == list(range(1, len(steps) + 1))


# Options.


@pytest.mark.ci
def test_options_go_anywhere(tmp_path: Path, call: Any):
    recipe = small(tmp_path)
    out = tmp_path / "out"
    done = call("--output-dir", out, "--max-steps=2", recipe, "--optimizer.learning-rate", "1e-3")
    assert (done.code, done.out) == (0, f"{out}: step 2\n")
    assert measured(out)[-1]["lr"] < 1e-3
    again = call(recipe, "--output-dir", out, "--quiet", "--resume", "--max-steps", 3)
    assert again.code == 2  # the other learning rate
    assert "optimizer.learning_rate: was 0.001, is 0.01" in again.err
    last = call("--resume", recipe, "--output_dir", out, "--optimizer.learning_rate=1e-3")
    assert last.code == 0
    assert measured(out)[-1]["step"] == 4
    quiet = call(recipe, "--quiet", "--output-dir", tmp_path / "quiet", "--max-steps", 1)
    assert quiet == (0, "", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-step", "3"], "max_step: unknown; is it max_steps?"),
        (["--max-steps", "many"], "max_steps: expected an integer or null, found 'many'"),
        (["--max-steps"], "--max-steps: needs a value"),
        (["--max-steps", "--resume"], "--max-steps: needs a value"),
        (["--max-steps", "3", "--max_steps=4"], "--max_steps: given twice"),
        (["--trainable", "[a"], "trainable: expected a list of strings, found '[a'"),
        (["--model", "null"], "model: missing"),
        (["--model", "t5"], "write model.path (in a command --model.path t5)"),
        (["--data=rows.csv"], "write data.path (in a command --data.path rows.csv)"),
        (["--optimizer", "lion"], "write optimizer.name (in a command --optimizer.name lion)"),
        (["lora=nul"], "lora: expected fields or null, found 'nul'"),
        (["--lora.rank", "-1"], "lora.rank: expected an integer from 1 on"),
        (["more.yaml"], "unexpected argument 'more.yaml'; usage: train.py [options] [RECIPE]"),
        (["--mesh.data", "3"], "mesh: data=3"),
        (["--mesh", "data=3"], "mesh: data=3"),
        (["--mesh.data", "1", "--mesh", "fsdp=1"], "--mesh: replaces its whole section, so give"),
        (["--mesh", "dta=3"], "--mesh: expected sizes such as data=2,tensor=4"),
        (["--data.path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--seed", "*x"], "seed: expected an integer, found '*x'"),
    ],
)
def test_errors_take_one_line(tmp_path: Path, call: Any, words: list[str], message: str):
    failed = call(small(tmp_path), "--quiet", *words)
    assert failed.code == 2
    assert failed.err.startswith("train.py: error: ")
    assert message in failed.err
    assert failed.err.count("\n") == 1
    assert failed.out == ""


def test_debug_shows_where(tmp_path: Path, call: Any):
    path = tmp_path / "no\x1b[2Jrecipe.yaml"
    assert call(path).err == f"train.py: error: {tmp_path}/no\\x1b[2Jrecipe.yaml: no such file\n"
    failed = call(path, "--debug")
    assert failed.code == 2
    assert "Traceback" in failed.err


def test_a_recipe_is_needed(call: Any):
    assert call().code == 2
    assert call("--help").code == 0


@pytest.mark.ci
def test_no_gradient_at_all(tmp_path: Path, call: Any):
    recipe = small(tmp_path, max_steps=9, skip_limit=3, optimizer={"learning_rate": 1e38})
    failed = call(recipe, "--quiet")
    assert failed.code == 2
    assert "3 batches in a row gave no finite gradient" in failed.err
    assert failed.err.count("\n") == 1
    assert sum(line["skipped"] for line in measured(tmp_path / "run")) == 3


# Signals.


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_saves(tmp_path: Path, spawn: Any, number: int, code: int):
    recipe = small(tmp_path, checkpoints={"every": 10**6})
    run = tmp_path / "run"
    process = spawn(recipe, "--max-steps", LONG)
    wait_for_lines(process, run, 3)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    step = latest(run)
    assert step == measured(run)[-1]["step"] >= 3
    train(read_recipe(recipe, {"max_steps": step + 2}), resume=True, quiet=True)
    assert_equal_runs(run, straight(recipe, tmp_path / "straight", step + 2))


STOPPING = """
import signal, sys, time
from jaxllm.cli.process import signals
with signals.handled("train.py"):
    stop = signals.stop_after("step")
    if sys.argv[1] == "late":
        assert stop() is None
    signal.raise_signal(signal.SIGTERM)
    if sys.argv[1] == "early":
        time.sleep(60)
    while stop() is None:
        time.sleep(0.01)
    assert stop() == signal.SIGTERM
    print("noted", flush=True)
    signal.raise_signal(int(sys.argv[2]))
    time.sleep(60)
    print("not reached", flush=True)
"""


@pytest.mark.by_default("15")
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_run_at_once(second: int):
    command = [sys.executable, "-c", STOPPING, "late", str(int(second))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (128 + second, "noted\n"), done.stderr
    first, last = done.stderr.splitlines()
    assert first == "train.py: SIGTERM: stopping after this step; a second signal ends at once"
    assert last == f"train.py: stopped by {second.name}"


def test_a_signal_before_the_first_step_ends_the_run_at_once():
    command = [sys.executable, "-c", STOPPING, "early", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, ""), done.stderr
    assert done.stderr == "train.py: stopped by SIGTERM\n"


@pytest.mark.ci
def test_a_second_writer(tmp_path: Path, spawn: Any, call: Any):
    recipe = small(tmp_path)
    process = spawn(recipe, "--max-steps", LONG, "--quiet")
    wait_for_lines(process, tmp_path / "run", 1)
    for words in (["--resume"], []):
        refused = call(recipe, *words)
        assert refused.code == 2
        assert f"process {process.pid} on " in refused.err
        assert refused.err.count("\n") == 1
    process.terminate()
    assert process.wait(60) == 143


# Kills.


def kill_often(tmp_path: Path, spawn: Any, kills: int) -> None:
    """Kills at random moments, among them those of saving, until so many are through."""
    rng = random.Random(kills)
    recipe, run = small(tmp_path), tmp_path / "run"
    for _ in range(kills):
        process = spawn(recipe, "--resume", "--max-steps", LONG, "--quiet")
        wait_for_lines(process, run, 1)
        time.sleep(rng.uniform(0, 1))
        process.kill()
        process.communicate()
        # The save that was under way may be lost, and the steps since then.
        assert lines_of(run) - latest(run) <= 2 * EVERY
    steps = max(latest(run) + 3, EVERY)
    train(read_recipe(recipe, {"max_steps": steps}), resume=True, quiet=True)
    assert_equal_runs(run, straight(recipe, tmp_path / "straight", steps))


@pytest.mark.slow
def test_two_kills(tmp_path: Path, spawn: Any):
    kill_often(tmp_path, spawn, 2)


@pytest.mark.slow
def test_many_kills(tmp_path: Path, spawn: Any):
    """Twenty, or as many as JAXLLM_KILLS says."""
    kill_often(tmp_path, spawn, int(os.environ.get("JAXLLM_KILLS", "20")))


# Full disks.


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path, spawn: Any):
    """Files may grow by what the log and the card need, which is too little for a checkpoint."""
    recipe, run = small(tmp_path, checkpoints={"every": 2, "keep": 50}), tmp_path / "run"
    train(read_recipe(recipe, {"max_steps": 4}), quiet=True)
    before = {step: saved(run, step) for step in (2, 4)}
    written = [run / name for name in ("metrics.jsonl", "metrics.csv", "run_card.json")]
    limit = max(path.stat().st_size for path in written) + 4000
    # JAX would leave programs that are cut off in the cache.
    process = spawn(recipe, "--resume", "--max-steps", LONG, "--quiet", "--no-compile-cache")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    (error,) = said.splitlines()
    assert error.startswith("train.py: error: ")
    assert "step 6 was not saved" in error
    assert "the steps before it are intact" in error
    assert {step: saved(run, step) for step in (2, 4)} == before
    steps = latest(run) + 2
    train(read_recipe(recipe, {"max_steps": steps}), resume=True, quiet=True)
    assert_equal_runs(run, straight(recipe, tmp_path / "straight", steps))
