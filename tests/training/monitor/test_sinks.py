"""Sinks: what TensorBoard's files hold, and that no step is there twice."""

from __future__ import annotations

import errno
import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxllm.common.errors import MissingExtraError, RunError
from jaxllm.training.monitor.metrics_log import MetricsLog, Sink, TensorBoardSink, WandbSink


def events(folder: Path) -> list[Event]:
    """Events of all files in name order: length, checksum, event, checksum (TFRecord)."""
    actual = []
    for file in sorted((folder / "tensorboard").iterdir()):
        data = file.read_bytes()
        while len(data) > 8:
            (size,) = struct.unpack("<Q", data[:8])
            if len(data) < 16 + size:  # torn, and passed over by TensorBoard, too
                break
            event = Event()
            event.ParseFromString(data[12 : 12 + size])
            actual.append(event)
            data = data[12 + size + 4 :]
    return actual


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps that TensorBoard shows: a start of a session purges those from its own on."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            for name, points in curves.items():
                curves[name] = [point for point in points if point[0] < event.step]
        for value in event.summary.value:
            curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def train(folder: Path, steps: range, resume_at: int | None = None) -> list[Sink]:
    sinks = [MetricsLog(folder, resume_at=resume_at), TensorBoardSink(folder, resume_at=resume_at)]
    for step in steps:
        metrics = {"loss": np.float32(step), "note": "text", "eval_loss": None}
        for sink in sinks:
            sink.log(step, metrics)
    return sinks


def test_tensorboard_goes_on_without_duplicates(tmp_path: Path) -> None:
    for sink in train(tmp_path, range(1, 6)):
        sink.close()
    assert shown(tmp_path) == {"loss": [(step, float(step)) for step in range(1, 6)]}
    for sink in train(tmp_path, range(4, 8), resume_at=3):
        sink.close()
    assert shown(tmp_path) == {"loss": [(step, float(step)) for step in range(1, 8)]}


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_sinks import train
train(Path(sys.argv[1]), range(1, 100))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ci
def test_what_a_kill_left_in_a_queue_is_there_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert len(shown(tmp_path).get("loss", [])) < 99, "else this test shows nothing"
    for sink in train(tmp_path, range(99, 103), resume_at=98):
        sink.close()
    assert shown(tmp_path) == {"loss": [(step, float(step)) for step in range(1, 103)]}


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log(1, {"loss": float("nan"), "grad_norm": math.inf})
    sink.close()
    curves = shown(tmp_path)
    assert math.isnan(curves["loss"][0][1])
    assert curves["grad_norm"] == [(1, math.inf)]


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [(TensorBoardSink, "tensorboardX", "tensorboard"), (WandbSink, "wandb", "wandb")],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{module}: pip install .*\[{extra}\]'"):
        make(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_id_of_a_wandb_run_is_never_half_of_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []
    wandb = SimpleNamespace(init=lambda **made: started.append(made["id"]), Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    WandbSink(tmp_path)
    WandbSink(tmp_path, resume_at=3)
    assert started[0] == started[1]
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(RunError, match=r"wandb_id: .*No space left"):
            WandbSink(tmp_path)
    WandbSink(tmp_path, resume_at=3)
    assert len(started) == 3
    assert started[0] == started[2]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail
