"""SIGINT, SIGTERM and SIGHUP end commands at any moment: 128 + N, one line, everything whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from tiny_runs import measured, saved, write_recipe

from jaxllm.cli.process import STOP_SIGNALS, signals

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
STEPS, ROWS = 30, 300


@pytest.fixture(autouse=True, scope="module")
def default_hangup() -> Iterator[None]:
    """SIGHUP ends a process, as it does unless the tests were started by nohup."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, handler)


class Command:
    """A resumable command whose result can be compared with that of a run without signals."""

    def __init__(self, arguments: list[str], programs: Path) -> None:
        self.arguments = arguments
        self.environment = {**os.environ, "JAXLLM_CACHE_DIR": str(programs)}
        self.began = False

    def start(self) -> subprocess.Popen[str]:
        resume = ["--resume"] if self.began else []
        return subprocess.Popen(
            [sys.executable, *self.arguments, *resume],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, number: int, wait: Callable[[subprocess.Popen[str]], None]) -> bool:
        """Starts it and sends a signal after `wait`; returns whether it ended by the signal."""
        process = self.start()
        wait_until_handled(process)
        wait(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert process.returncode in (0, 128 + number), (out, err)
        lines = err.splitlines()
        assert len(lines) <= 1, err
        if lines:
            assert lines[0].endswith(f"stopped by {signal.Signals(number).name}")
        return process.returncode != 0

    def clear(self) -> None:
        """Starts anew: removes the result."""
        self.began = False
        for path in self.results():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def results(self) -> list[Path]:
        raise NotImplementedError

    def finish(self) -> None:
        process = self.start()
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, ""), (out, err)


def wait_until_handled(process: subprocess.Popen[str]) -> None:
    """Waits until the command has installed its handler of SIGHUP, before its first import."""
    while True:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        if caught >> signal.SIGHUP - 1 & 1:
            return
        assert process.poll() is None
        time.sleep(0.001)


def at_once(process: subprocess.Popen[str]) -> None:
    """The first moment: the heavy imports begin."""


def after(seconds: float) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: time.sleep(seconds)


def once(condition: Callable[[], bool]) -> Callable[[subprocess.Popen[str]], None]:
    def wait(process: subprocess.Popen[str]) -> None:
        while not condition():
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)

    return wait


class BatchCommand(Command):
    def __init__(self, folder: Path, programs: Path) -> None:
        self.output = folder / "out.jsonl"
        rows = [{"prompt": f"Hello {i}", "max_new_tokens": 1 + i % 24} for i in range(ROWS)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = ["--input", str(folder / "rows.jsonl"), "--output", str(self.output)]
        sampled = ["--do-sample", "--seed", "3", "--slots", "4", "--memory", "1GB"]
        super().__init__(
            [str(ROOT / "generate.py"), "--model", str(MODEL), *files, *sampled, "--quiet"],
            programs,
        )

    @property
    def rows_done(self) -> int:
        journal = self.output.parent / "out.jsonl.parts" / "rows.jsonl"
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def results(self) -> list[Path]:
        return [path for path in self.output.parent.iterdir() if path.name != "rows.jsonl"]

    def result(self) -> Any:
        return self.output.read_bytes(), sorted(path.name for path in self.results())


class TrainCommand(Command):
    def __init__(self, folder: Path, programs: Path) -> None:
        data = {
            **{"path": str(folder / "rows.jsonl"), "format": "text"},
            **{"max_length": 32, "bucket": None},
        }
        every = {"checkpoints": {"every": 5}, "evaluation": {"every": 10}}
        recipe = write_recipe(folder, data=data, eval_data=dict(data), max_steps=STEPS, **every)
        self.run = folder / "run"
        super().__init__([str(ROOT / "train.py"), str(recipe), "--quiet"], programs)

    def results(self) -> list[Path]:
        return [self.run]

    def result(self) -> Any:
        return saved(self.run), measured(self.run), sorted(p.name for p in self.run.iterdir())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs of these commands, apart from other tests': their processes are ended."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def batch(tmp_path: Path, programs: Path) -> BatchCommand:
    return BatchCommand(tmp_path, programs)


def test_a_signal_during_the_imports(batch: BatchCommand) -> None:
    for number in STOP_SIGNALS:
        assert batch.end(number, at_once)
    assert not batch.output.parent.joinpath("out.jsonl").exists()


EXIT = """
import os, signal, sys, time
from jaxllm.cli.process import signals
class LateSignal:
    def __del__(self):  # as Python finalizes
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
signals.install("x")
sys.modules["late"] = LateSignal()
"""


def test_a_signal_while_python_exits_is_ignored() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_signal_between_rows(batch: BatchCommand) -> None:
    wait = once(lambda: batch.rows_done > 3)
    assert batch.end(signal.SIGHUP, wait)
    done = batch.rows_done
    assert 3 < done < ROWS
    batch.began = True
    assert batch.end(signal.SIGTERM, once(lambda: batch.rows_done > done))
    batch.finish()
    assert batch.output.read_bytes().count(b"\n") == ROWS


def check_random_signals(command: Any, straight: Any, count: int, seed: int) -> None:
    """Signals at random times over the whole of the command, until it was ended `count` times."""
    start = time.monotonic()
    straight.finish()
    seconds = time.monotonic() - start
    rng, ended = random.Random(seed), 0
    while ended < count:
        number = rng.choice(STOP_SIGNALS)
        if command.end(number, after(rng.uniform(0, seconds))):
            command.began, ended = True, ended + 1
        else:  # it had ended before the signal
            assert command.result() == straight.result()
            command.clear()
    command.finish()
    assert command.result() == straight.result()


@pytest.mark.slow
@pytest.mark.parametrize("make", [BatchCommand, TrainCommand])
def test_50_signals_at_random_times(make: Any, tmp_path: Path, programs: Path) -> None:
    commands = []
    for name in ("command", "straight"):
        (tmp_path / name).mkdir()
        commands.append(make(tmp_path / name, programs))
    check_random_signals(*commands, count=50, seed=0)


# In Python.


@pytest.fixture
def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in STOP_SIGNALS}


def test_handlers_are_restored(handlers: dict[int, Any]) -> None:
    with signals.handled("x"):
        assert {signal.getsignal(number) for number in handlers}.isdisjoint(handlers.values())
    assert handlers == {number: signal.getsignal(number) for number in handlers}


def test_one_of_several_processes_waits_for_an_agreement() -> None:
    """Between its first signal and its first step it may not leave while the others wait."""
    with signals.handled("x"):
        stop = signals.stop_after("step", quiet=True, from_now_on=True)
        os.kill(os.getpid(), signal.SIGTERM)
        while stop() is None:
            time.sleep(0.001)
        assert stop() == signal.SIGTERM
