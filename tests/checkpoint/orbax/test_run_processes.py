"""Saving in two processes and restoring in one, and the reverse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from devices import free_port

PROCESS = """
import sys
folder, port, count, index, step, task = sys.argv[1:]
import jax, jax.numpy as jnp, numpy as np
if int(count) > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.errors import CheckpointError, RunError

assert jax.process_count() == int(count)
mesh = Mesh(np.array(jax.devices()), "data")
split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def spread(x, sharding):
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

def state(step):
    w = np.random.default_rng(step).standard_normal((8, 6), dtype=np.float32)
    return {"w": spread(w, split), "b": spread(w[0], whole), "step": spread(np.int32(step), whole)}

saved, problems = [], []
options = dict(on_saved=lambda step, *_: saved.append(step), on_problem=problems.append)
target = state(0)
step = int(step)
if task == "locked":
    try:
        RunCheckpoints(folder)
    except RunError as error:
        print(error)
    sys.exit()
with RunCheckpoints(folder, keep=2, **options) as checkpoints:
    if checkpoints.latest() is not None:
        arrays, meta, restored = checkpoints.restore(target=target)
        assert meta == {"by": meta["by"], "step": restored}
        for name, x in state(restored).items():
            assert arrays[name].sharding == x.sharding
            for a, b in zip(arrays[name].addressable_shards, x.addressable_shards, strict=True):
                np.testing.assert_array_equal(a.data, b.data)
        print("restored", restored, len(problems))
    for step in (step, step + 1, step + 2):
        checkpoints.save(step, state(step), {"by": int(count), "step": step})
    checkpoints.wait()
    if int(count) > 1:
        multihost_utils.sync_global_devices("the first process has deleted expired steps")
    assert saved == [step - 2, step - 1, step], saved
    print("saved", checkpoints.steps())
"""


def run(folder: Path, count: int, step: int, task: str = "train") -> list[str]:
    """Output of each of the processes."""
    port = free_port()
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={4 // count}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS]
            + [str(x) for x in (folder, port, count, index, step, task)],
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr
    # The library of collectives prints its own greetings, sometimes broken into two lines.
    greetings = ("[Gloo]", "connected peer ranks")
    return [
        "\n".join(x for x in stdout.splitlines() if not any(part in x for part in greetings))
        for stdout, _ in outputs
    ]


@pytest.mark.slow
def test_two_processes_and_one(tmp_path):
    assert run(tmp_path, 2, 1) == ["saved [2, 3]"] * 2
    assert run(tmp_path, 1, 4) == ["restored 3 0\nsaved [5, 6]"]
    assert run(tmp_path, 2, 7) == ["restored 6 0\nsaved [8, 9]"] * 2


@pytest.mark.slow
def test_two_processes_skip_the_same_damaged_step(tmp_path):
    run(tmp_path, 2, 1)
    (tmp_path / "3" / "record" / "metadata").write_text("{}")
    assert run(tmp_path, 2, 4) == ["restored 2 1\nsaved [5, 6]"] * 2


@pytest.mark.slow
def test_locked_folder_fails_in_all_processes(tmp_path):
    from jaxllm.common.files import RunLock

    lock = RunLock(tmp_path)
    first, second = run(tmp_path, 2, 1, "locked")
    lock.release()
    assert f"process {os.getpid()} on" in first
    assert second == "it failed in process 0"
