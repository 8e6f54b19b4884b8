"""Runs whose data are streamed: exact resume, several processes, preferences, and large files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from devices import environment
from test_preference_run import preferences
from test_training_processes import finish, numbers, start
from tiny_runs import go_on, measured, recipe, rows, run_of, saved, write_recipe

from jaxllm.common.errors import DataError
from jaxllm.training.data import stream
from jaxllm.training.run.run import train

PACKED = {"format": "text", "max_length": 32, "packing": True, "streaming": True}
# `python train.py` with windows of some rows.
SMALL_WINDOWS = """
import sys
from jaxllm.cli.process import signals
signals.install("train.py")
from jaxllm.training.data import stream
stream.WINDOW_BATCHES, stream.WINDOW_ROWS = 1, 8
from jaxllm.cli import train
sys.exit(train.main(sys.argv[1:]))
"""
# Peak memory after the imports and at the end, and seconds to the first batch.
READ = """
import re, sys, time
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, make_batches
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
before, start = peak(), time.perf_counter()
model = ModelInfo(kind="causal", vocab_size=258, context_length=2048)
config = DataConfig(format="text", path=sys.argv[1], packing=True)
batches = make_batches(config, byte_tokenizer(), model=model, batch_size=8)
next(batches)
first = time.perf_counter() - start
for _ in range(int(sys.argv[2])):
    next(batches)
print(first, peak() - before, batches.window, batches.counts.rows)
"""


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(stream, "WINDOW_BATCHES", 1)
    monkeypatch.setattr(stream, "WINDOW_ROWS", 8)


@pytest.mark.ci
def test_six_steps_and_six_more_are_twelve(tmp_path, small_windows):
    """To the bit, with an evaluation that is streamed too."""
    data = {"path": str(tmp_path / "rows.jsonl"), **PACKED}
    changes = {"data": data, "eval_data": dict(data), "evaluation": {"every": 3}, "batch_size": 2}
    straight, halves = (
        recipe(tmp_path, **changes, output_dir=str(tmp_path / name)) for name in ("a", "b")
    )
    train(straight, quiet=True)
    train(recipe(tmp_path, **changes, output_dir=str(tmp_path / "b"), max_steps=6), quiet=True)
    assert saved(run_of(halves))[1]["window"] > 0
    go_on(halves)
    assert saved(run_of(halves)) == saved(run_of(straight))
    assert measured(run_of(halves)) == measured(run_of(straight))
    kept = train(
        recipe(
            tmp_path,
            **changes | {"eval_data": {**data, "streaming": False}},
            output_dir=str(tmp_path / "c"),
            max_steps=3,
        ),
        quiet=True,
    )
    assert kept.metrics["eval_loss"] == pytest.approx(
        measured(run_of(straight))[2]["eval_loss"], rel=1e-6
    )
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(DataError, match="examples was"):
        go_on(halves, max_steps=13)


@pytest.mark.slow
def test_two_processes_read_what_one_does(tmp_path):
    """Also after a resume on another number of processes."""
    changes = {"batch_size": 4, "mesh": {"data": 2, "fsdp": 2}, "checkpoints": {"every": 3}}
    recipes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        data = {"path": str(tmp_path / name / "rows.jsonl"), **PACKED}
        made = write_recipe(tmp_path / name, data=data, eval_data=dict(data), **changes)
        recipes.append(made)
    one, two = recipes
    cache, program = tmp_path / "programs", ("-c", SMALL_WINDOWS)
    finish(start(one, cache, processes=1, program=program))
    for last, processes in ((5, 2), (9, 1), (12, 2)):
        steps = ["--max-steps", str(last), *(["--resume"] if last > 5 else [])]
        finish(start(two, cache, *steps, processes=processes, program=program))
    one, two = (
        [numbers(tmp_path / name, field) for field in ("loss", "tokens")] for name in ("one", "two")
    )
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    assert two[1] == one[1]
    states = [saved(tmp_path / name / "run")[1] for name in ("one", "two")]
    assert states[0] == states[1]
    assert states[0]["epoch"] > 0
    assert "window_rows" in states[0]


@pytest.mark.slow
def test_a_bad_row_in_the_share_of_one_process_ends_both(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in rows()]
    lines[2] = json.dumps({"text": "too long" * 9})
    path.write_text("\n".join(lines))
    data = {"path": str(path), **PACKED, "shuffle": False}
    made = write_recipe(tmp_path, data=data, mesh={"data": 2, "fsdp": 2})
    program = SMALL_WINDOWS.replace("= 1, 8", "= 1, 8\nstream.SAMPLE_ROWS = 1")
    running = start(made, tmp_path / "programs", program=("-c", program))
    texts = ["".join(process.communicate(timeout=120)) for process in running]
    assert all(process.returncode for process in running)
    assert f"{path}:3: 73 tokens, but max_length is 32" in texts[0], texts
    assert "it failed in process 0" in texts[1], texts


@pytest.mark.slow
def test_preferences(tmp_path, small_windows):
    """The reference of every pair, and the resume with what is stored of it."""
    fields = preferences(tmp_path).data
    data = {"format": "preference", "path": fields.path, "max_length": 16, "streaming": True}
    made = preferences(tmp_path, data=data, eval_data=dict(data))
    result = train(made, quiet=True)
    first = measured(result.folder)[0]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)  # model and reference are the same
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-5)
    (tmp_path / "half").mkdir()
    half = preferences(tmp_path / "half", data=data, eval_data=dict(data), max_steps=3)
    train(half, quiet=True)
    assert saved(go_on(half, max_steps=6).folder) == saved(result.folder)


def read(path: Path, batches: int, cache: Path) -> tuple[float, float, int, int]:
    """Seconds to the first batch, MiB, number of the last window, rows."""
    env = environment(1) | {"JAXLLM_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", READ, str(path), str(batches)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, memory, window, count = map(float, done.stdout.split())
    return first, memory, int(window), int(count)


@pytest.mark.slow
def test_ten_million_rows_start_in_seconds(tmp_path):
    """The memory is that of the index (160 MB) and of two windows, not of 700 MB of rows."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for first in range(0, 10_000_000, 100_000):
            texts = (f"row {n}, {'x' * (n % 50)}" for n in range(first, first + 100_000))
            file.write("".join(f'{{"text": "{text}"}}\n' for text in texts))
    built, kept = (read(path, 500, tmp_path / "cache") for _ in range(2))
    print("10 million rows: first batch after s, MiB:", built[:2], kept[:2])
    assert built[3] == 10_000_000
    assert built[0] < 60
    assert kept[0] < 30
    assert max(built[1], kept[1]) < 500


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_memory_is_bounded(tmp_path, suffix):
    """300 MB of rows of 2,000 characters, of which some windows are read."""
    words = np.random.default_rng(0).integers(97, 123, (150_000, 2000), np.uint8)
    path = tmp_path / f"rows.{suffix}"
    texts = [bytes(row).decode() for row in words]
    if suffix == "parquet":
        pq.write_table(
            pyarrow.table({"text": texts}), path, row_group_size=10_000, compression="none"
        )
    else:
        before, after = ('{"text": "', '"}') if suffix == "jsonl" else ('"', '"')
        head = "" if suffix == "jsonl" else "text\n"
        path.write_text(head + "".join(f"{before}{text}{after}\n" for text in texts))
    del texts, words
    first, memory, window, count = read(path, 4000, tmp_path / "cache")
    print(suffix, "first batch after s, MiB, windows:", first, memory, window)
    assert count == 150_000
    assert window >= 3
    assert memory < 500
