"""Two processes of two devices train one model through train.py; one is killed; both go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from devices import environment, free_port
from paths import ROOT
from tiny_runs import saved, write_recipe

from jaxllm.training.monitor.metrics_log import read_metrics

TRAIN = ROOT / "train.py"
# Process 1 gets a signal after both have connected, while process 0 is in its first agreement.
LATE = """
import os, signal, sys, time
from jaxllm.cli.process import signals
signals.install("train.py")
import jax
from jaxllm.cli import train
from jaxllm.training.run import run
set_up = run.set_up
def late(recipe, say):
    setup = set_up(recipe, say)
    if jax.process_index() == 1:
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    return setup
run.set_up = late
sys.exit(train.main(sys.argv[1:]))
"""


def start(
    recipe: Path,
    cache: Path,
    *options: str,
    processes: int = 2,
    program: tuple[str, ...] = (str(TRAIN),),
) -> list[subprocess.Popen]:
    """The processes of one run."""
    address = f"127.0.0.1:{free_port()}"
    together = ["--coordinator", address, "--num-processes", str(processes)]
    env = environment(4 // processes) | {"JAXLLM_CACHE_DIR": str(cache)}
    return [
        subprocess.Popen(
            [sys.executable, *program, str(recipe), *options]
            + ([*together, "--process-id", str(index)] if processes > 1 else []),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]


def finish(processes: list[subprocess.Popen]) -> list[str]:
    """Stdout of each process; all have to succeed."""
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out + err
    return [out for out, _ in outputs]


def numbers(folder: Path, field: str) -> list[float]:
    """One field of every step."""
    rows = list(read_metrics(folder / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row[field] for row in rows]


@pytest.mark.slow
def test_a_run_of_two_processes_survives_the_death_of_one(tmp_path):
    cache = tmp_path / "programs"
    folders = {name: tmp_path / name for name in ("one", "two")}
    recipes = {}
    for name, folder in folders.items():
        folder.mkdir()
        every = {"every": 2, "keep": 100}
        recipes[name] = write_recipe(folder, checkpoints=every, mesh={"data": 2, "fsdp": 2})
    finish(start(recipes["one"], cache, "--max-steps", "8", processes=1))

    running = start(recipes["two"], cache, "--max-steps", "1000")
    deadline = time.monotonic() + 240
    while not (folders["two"] / "run" / "checkpoints" / "4").is_dir():
        assert time.monotonic() < deadline, "no checkpoint"
        assert all(process.poll() is None for process in running)
        time.sleep(0.05)
    running[1].send_signal(signal.SIGKILL)
    time.sleep(1)
    running[0].kill()  # as a cluster does with the others
    for process in running:
        process.communicate(timeout=60)

    last = saved(folders["two"] / "run")[1]
    target = str(max(8, last["epoch"] * 100 + last["batch"] + 2))
    said = finish(start(recipes["two"], cache, "--max-steps", target, "--resume"))
    assert "step" in said[0]
    assert "step" not in said[1]  # one process speaks
    finish(
        start(recipes["two"], cache, "--max-steps", str(int(target) + 2), "--resume", processes=1)
    )
    ours, theirs = (numbers(folders[name], "loss") for name in ("two", "one"))
    assert ours[:8] == pytest.approx(theirs[:8], rel=1e-5)
    assert len(ours) == int(target) + 2
    ours, theirs = (numbers(folders[name], "tokens") for name in ("two", "one"))
    assert ours[:8] == theirs[:8]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(tmp_path):
    recipe = write_recipe(tmp_path, checkpoints={"every": 500, "keep": 1})
    running = start(recipe, tmp_path / "programs", "--max-steps", "100000", "--log-every", "1")
    while "step 3/" not in (running[0].stderr.readline() or "step 3/"):
        pass
    running[1].send_signal(signal.SIGTERM)
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 143, out + err
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert steps == [len(numbers(tmp_path, "loss"))]


@pytest.mark.slow
def test_a_signal_before_the_first_step_lets_no_process_leave_alone(tmp_path):
    recipe = write_recipe(tmp_path, checkpoints={"every": 500, "keep": 1})
    running = start(recipe, tmp_path / "programs", program=("-c", LATE))
    said = []
    for process in running:
        out, err = process.communicate(timeout=60)  # JAX notices a lost process after minutes
        assert (process.returncode, out.count("step 0")) == (143, process is running[0]), out + err
        said.append(err)
    assert "another process received SIGTERM" in said[0]
    assert "Traceback" not in "".join(said)


@pytest.mark.slow
def test_two_processes_score_the_answers_that_one_does(tmp_path):
    """Sampled answers, in batches that do not divide the rows."""
    fields = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.5}
    evaluation = {"batch_size": 4, "metrics": ["rouge", "chrf"], "fields": fields}
    rows = [{"source": f"{n}: ", "target": "yes" if n % 2 else "no"} for n in range(22)]
    measured = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"path": str(path), "format": "prompt_completion", "max_length": 32}
        data |= {"prompt_field": "source", "completion_field": "target"}
        recipe = write_recipe(
            folder,
            data=data,
            eval_data=dict(data),
            evaluation=evaluation,
            optimizer={"learning_rate": 3e-2},
            max_steps=20,
            mesh={"data": 2, "fsdp": 2},
        )
        finish(start(recipe, tmp_path / "programs", processes=processes))
        measured.append(list(read_metrics(folder / "run" / "metrics.jsonl"))[-1])
    one, two = measured
    assert 0.1 < one["eval_rouge1"] < 0.9
    for field in ("eval_loss", "eval_rouge1", "eval_rougeL", "eval_chrf"):
        assert one[field] == pytest.approx(two[field], rel=1e-5), field
