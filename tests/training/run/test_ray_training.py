"""`train.py --engine ray` with a worker on each of two nodes, one of which is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from ray_clusters import CPUS, actor_processes, two_nodes
from tiny_runs import measured, saved, write_recipe

STEPS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as started:
        yield started


def start(cluster: Any, folder: Path, *flags: str) -> subprocess.Popen:
    """The command, with a recipe that saves often, and relative paths."""
    folder.mkdir()
    recipe = write_recipe(folder, checkpoints={"every": 2, "keep": 100}, output_dir="run")
    command = [
        *(sys.executable, str(ROOT / "train.py"), recipe.name, "--max-steps", str(STEPS), *flags),
        *("--engine", "ray", "--address", cluster.address),
        *("--workers", "2", "--worker-resources", f"CPU={CPUS}"),
    ]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"JAXLLM_CACHE_DIR": str(folder.parent / "programs")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(cluster, tmp_path):
    whole = start(cluster, tmp_path / "whole")
    out, err = whole.communicate(timeout=500)
    assert whole.returncode == 0, err
    assert f"run: step {STEPS}" in out

    killed = start(cluster, tmp_path / "killed")
    while not (tmp_path / "killed" / "run" / "checkpoints" / "4").is_dir():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    os.kill(actor_processes("RayTrainWorker")[1], signal.SIGKILL)
    out, err = killed.communicate(timeout=500)
    assert killed.returncode == 0, err
    resumed = [int(step) for step in re.findall(r"resuming at step (\d+)", out + err)]
    assert len(resumed) == 1, out + err
    assert 4 <= resumed[0] < STEPS
    runs = [tmp_path / name / "run" for name in ("whole", "killed")]
    assert [line["step"] for line in measured(runs[0])] == list(range(1, STEPS + 1))
    assert measured(runs[0]) == measured(runs[1])
    assert saved(runs[0], STEPS) == saved(runs[1], STEPS)


@pytest.mark.slow
def test_an_error_of_the_workers_is_that_of_the_command(cluster, tmp_path):
    process = start(cluster, tmp_path / "bad", "--restarts", "0", "--data.path", "missing.jsonl")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 2, err
    assert re.search(r"^train\.py: error: run: .*missing\.jsonl", err, re.MULTILINE), err
