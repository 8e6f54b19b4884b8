"""kill -9 while saving: steps that were reported as saved are intact, bit for bit."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import SUPPORT
from run_states import bits, like, meta, state

from jaxllm.checkpoint.orbax import RunCheckpoints

RUN = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
from run_states import bits, like, meta, state
from jaxllm.checkpoint.orbax import RunCheckpoints

def report(step, seconds, size):
    print(step, flush=True)

def refuse(problem):
    sys.exit(problem)

with RunCheckpoints(sys.argv[1], keep=2, on_saved=report, on_problem=refuse) as checkpoints:
    step = 0
    if checkpoints.latest() is not None:
        restored = checkpoints.restore(target=like(state(0)))
        step = restored.step
        assert restored.meta == meta(step) and bits(restored.arrays) == bits(state(step))
    while True:
        step += 1
        checkpoints.save(step, state(step), meta(step))
"""


def kill_often(folder: Path, kills: int) -> None:
    rng = random.Random(kills)
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(rng.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        rest, stderr = process.communicate()
        assert first, stderr
        # The line itself may be cut off by the kill.
        reported = int((first + rest).rsplit("\n", 1)[0].splitlines()[-1])
        problems: list[str] = []
        with RunCheckpoints(folder, writable=False, on_problem=problems.append) as checkpoints:
            restored = checkpoints.restore(target=like(state(0)))
        assert problems == []
        assert reported <= restored.step <= reported + 1
        assert restored.meta == meta(restored.step)
        assert bits(restored.arrays) == bits(state(restored.step))


@pytest.mark.ci
def test_two_kills(tmp_path):
    kill_often(tmp_path, 2)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    kill_often(tmp_path, 20)
