"""A resumed job runs its rows in programs of the same sizes as the run that was killed."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny

from jaxllm import BatchGenerator
from jaxllm.batch import row_window, slot_pool
from jaxllm.batch.job.job import Job
from jaxllm.batch.job.journal import with_checksum
from jaxllm.batch.tables import read_source
from jaxllm.common.compiling import CompileClock

MODEL = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=256)
IDENTITY = {"--model": "tiny"}


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(row_window, "WINDOW", 8)


def rows() -> list[dict[str, Any]]:
    """Short rows of two groups, with longer ones in later windows."""
    result: list[dict[str, Any]] = []
    for i in range(32):
        result.append({"input_ids": [3 + i, 5, 7 + i % 9], "max_new_tokens": 2 + i % 6})
        if i >= 12 and i % 5 == 0:
            result[-1]["max_new_tokens"] = 40
        if i % 4 == 1:
            result[-1] |= {"suppress_tokens": [9]}
        if i >= 20 and i % 4 == 2:
            result[-1] |= {"do_sample": True, "temperature": 0.5, "seed": i}
    return result


def job(folder: Path, model: Any = MODEL, **options: Any) -> Job:
    folder.mkdir(exist_ok=True)
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    engine = BatchGenerator(model, **{"slots": 4, **options})
    return Job(engine, read_source(source), folder / "out.jsonl", IDENTITY, resume=True)


def run(work: Job) -> bytes:
    with contextlib.closing(CompileClock()) as clock:
        for _ in work.run(clock):
            pass
    return work.output.read_bytes()


def killed(folder: Path, after: int, model: Any = MODEL, **options: Any) -> Path:
    """The folder of a job as it is on the disk after so many rows."""
    crashed = folder.with_name(f"{folder.name}-{after}")
    work = job(folder, model, **options)
    with (
        contextlib.closing(CompileClock()) as clock,
        contextlib.closing(work.run(clock)) as outputs,
    ):
        for _ in range(after):
            next(outputs)
        shutil.copytree(folder, crashed)
    shutil.rmtree(folder)
    return crashed


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_job_has_the_same_bits(tmp_path, dtype):
    model = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=256, dtype=dtype)
    whole = job(tmp_path / "whole", model)
    expected = run(whole)
    programs = set(whole.engine.counts.program_calls)
    assert {name.rpartition(" x ")[2] for name in programs if name.startswith("decode")} >= {
        "16",
        "64",
        "16, group 1",
    }
    for after in (1, 5, 9, 14, 20, 27, 31):
        crashed = killed(tmp_path / "killed", after, model)
        resumed = job(crashed, model)
        assert run(resumed) == expected, after
        assert set(resumed.engine.counts.program_calls) <= programs, after
        assert not resumed.report.sizes_changed


@pytest.mark.ci
def test_other_slots_are_said(tmp_path):
    crashed = killed(tmp_path / "killed", 20)
    kept = json.loads((crashed / "out.jsonl.parts" / "pools.json").read_text())
    assert {pool["sizes"]["slots"] for pool in kept["pools"]} == {4}
    resumed = job(crashed, slots=2)
    run(resumed)
    calls = resumed.engine.counts.program_calls
    assert {name.split()[1] for name in calls if name.startswith("decode")} == {"2"}
    assert resumed.report.sizes_changed
    assert json.loads(resumed.report_path.read_text())["sizes_changed"]
    assert any("--slots" in value for name, value in resumed.report.table() if name == "sizes")
    assert not (crashed / "out.jsonl.parts").exists()


def test_sizes_of_another_version_are_chosen_anew_and_that_is_said(tmp_path):
    crashed = killed(tmp_path / "killed", 20)
    path = crashed / "out.jsonl.parts" / "pools.json"
    kept = json.loads(path.read_bytes())
    del kept["crc32"]
    for pool in kept["pools"]:
        pool["sizes"]["unknown"] = 1
    path.write_bytes(with_checksum(kept))
    resumed = job(crashed)
    assert len(run(resumed).splitlines()) == len(rows())
    assert resumed.report.sizes_changed


@pytest.mark.ci
def test_a_job_without_sizes_goes_on(tmp_path):
    """As one that an earlier version began."""
    crashed = killed(tmp_path / "killed", 20)
    (crashed / "out.jsonl.parts" / "pools.json").unlink()
    resumed = job(crashed)
    assert len(run(resumed).splitlines()) == len(rows())
    assert not resumed.report.sizes_changed


def test_halved_slots_are_kept(tmp_path, monkeypatch):
    program = slot_pool.decode_slots

    def refuse(model, slots, *arguments, **options):
        if slots.count > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return program(model, slots, *arguments, **options)

    monkeypatch.setattr(slot_pool, "decode_slots", refuse)
    crashed = killed(tmp_path / "killed", 3)
    monkeypatch.setattr(slot_pool, "decode_slots", program)
    resumed = job(crashed)
    run(resumed)
    calls = resumed.engine.counts.program_calls
    short = [name for name in calls if name.startswith("decode") and name.endswith(" x 16")]
    assert short == ["decode 2 x 16"]
