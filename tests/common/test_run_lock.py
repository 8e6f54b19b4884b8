"""Run lock: one writer per folder, freed when its holder dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from jaxllm.common.errors import RunError
from jaxllm.common.files import LOCK_FILE, RunLock

HOLD = """
import os, pathlib, sys, time
from jaxllm.common.files import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
if len(sys.argv) > 2:
    started, start = os.pipe()
    if os.fork() == 0:  # a forked child that outlives the run
        os.write(start, b".")
        os.close(1)
        time.sleep(60)
        os._exit(0)
    os.read(started, 1)  # the child has started
print("held", os.getpid(), flush=True)
time.sleep(60)
"""


def holder(folder, *options: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"held {process.pid}\n"
    return process


def test_second_writer_in_same_process_is_refused(tmp_path):
    lock = RunLock(tmp_path / "run")
    with pytest.raises(RunError, match=f"process {os.getpid()} on .* is writing here"):
        RunLock(tmp_path / "run")
    lock.release()
    lock.release()
    RunLock(tmp_path / "run").release()


def test_second_process_is_told_the_holder_and_a_dead_process_holds_nothing(tmp_path):
    with holder(tmp_path, "with a forked child") as process:
        with pytest.raises(RunError, match=f"process {process.pid} on"):
            RunLock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert str(process.pid) in (tmp_path / LOCK_FILE).read_text()
    RunLock(tmp_path).release()  # although the forked child lives on


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written to"):
        RunLock(tmp_path / "file")
