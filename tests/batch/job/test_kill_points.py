"""A job dies, or its disk is full, at file operations: nothing is lost, repeated or foreign."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import folder_cases
import pytest
import recorded_job
from file_faults import disk_full_at
from paths import ROOT, SUPPORT
from recorded_job import IDENTITY, run

from jaxllm.batch.job import journal
from jaxllm.batch.job.identity import checkpoint_digests
from jaxllm.batch.job.journal import Journal, check_output, journal_folder, report_file
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import CheckpointError, DataError, MissingFileError, RunError
from jaxllm.tokenizers.settings import TOKEN_IDS


def kill_points(folder: Path, step: int) -> int:
    """Kills a job at every `step`-th file operation; returns the last one."""
    command = [sys.executable, str(Path(recorded_job.__file__)), str(folder), str(step)]
    paths = f"{SUPPORT}:{ROOT}"
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout)


@pytest.mark.ci
def test_a_job_that_dies_at_a_file_operation_goes_on(tmp_path):
    assert kill_points(tmp_path, 9) > 40


@pytest.mark.slow
def test_a_job_that_dies_at_any_file_operation_goes_on(tmp_path):
    assert kill_points(tmp_path, 1) > 50


def test_a_full_disk_is_one_error_and_the_job_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "COMMIT_ROWS", 2)
    full = tmp_path / "whole"
    full.mkdir()
    work = recorded_job.recorded_job(full)
    with disk_full_at(1000) as count:
        expected = run(work)
    assert count[0] == 16
    for write in range(1, count[0] + 1, 2):
        folder = tmp_path / str(write)
        folder.mkdir()
        work = recorded_job.recorded_job(folder)
        with (
            disk_full_at(write),
            pytest.raises(RunError, match=f"{folder}.*No space left on device"),
        ):
            run(work)
        assert run(recorded_job.recorded_job(folder)) == expected


def test_rows_of_another_job_are_never_used(tmp_path):
    output, folder = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    with Journal(output, IDENTITY, resume=False) as first:
        first.add(0, {"id": "old"}, {})
        started = (folder / "job.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: is a row of another job"):
        Journal(output, {**IDENTITY, "input": "other"}, resume=False)
    # A finished job whose folder was not removed to the end.
    started.rename(folder / "finished.json")
    with Journal(output, {**IDENTITY, "input": "other"}, resume=False) as second:
        assert second.done == {}
    assert json.loads((folder / "job.json").read_text())["input"] == "other"


def test_damaged_sizes_are_refused(tmp_path):
    """Another number would be another program, or one that no memory holds."""
    pools = tmp_path / "out.parts" / "pools.json"
    with Journal(tmp_path / "out", IDENTITY, resume=False) as first:
        first.save_pools({"pools": [{"slots": 4}]})
    whole = pools.read_bytes()
    for content in (b"", b"{", b"[]", b"{}", whole[:-9], whole.replace(b"4}", b"999999999}")):
        pools.write_bytes(content)
        with pytest.raises(DataError, match=r"pools\.json: is damaged; remove it"):
            Journal(tmp_path / "out", IDENTITY, resume=True)
    pools.write_bytes(whole)
    with Journal(tmp_path / "out", IDENTITY, resume=True) as second:
        assert second.pools["pools"] == [{"slots": 4}]


def test_another_model_is_refused_by_name(tmp_path):
    Journal(tmp_path / "out", IDENTITY, resume=False).__exit__()
    other = {**IDENTITY, "--model": "moved", "model weights": "4567"}
    with pytest.raises(RunError, match="model weights: was '0123'"):
        Journal(tmp_path / "out", other, resume=True)
    Journal(tmp_path / "out", {**other, "model weights": "0123"}, resume=True).__exit__()


def test_other_ids_of_texts_are_the_reason(tmp_path):
    """A job of an earlier version on a folder whose tokenizer makes other ids now."""
    folder = folder_cases.write(tmp_path / "folder", "phi3-4")
    now = {**IDENTITY, **checkpoint_digests(folder)}
    before = {name: value for name, value in now.items() if name != TOKEN_IDS}
    with Journal(tmp_path / "out", before, resume=False):
        pass
    with pytest.raises(RunError, match=r"token ids: an earlier version of jaxllm began it, which"):
        Journal(tmp_path / "out", now, resume=True)
    (folder / "tokenizer.model").unlink()  # as today, tokenizer.json decides
    assert TOKEN_IDS not in checkpoint_digests(folder)


def test_a_pipe_in_a_model_folder_has_no_digest(tmp_path):
    os.mkfifo(tmp_path / "vocab.json")
    with pytest.raises(CheckpointError, match=r"vocab\.json: is no regular file"):
        checkpoint_digests(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"settings": 5}', "{", ""])
def test_foreign_reports_are_refused(tmp_path, content):
    output = tmp_path / "out"
    output.write_text("")
    report_file(output).write_text(content)
    with pytest.raises(RunError, match=re.escape(str(report_file(output)))):
        check_output(output, IDENTITY, resume=True)


def test_a_running_job_is_named_before_what_it_left(tmp_path):
    output = tmp_path / "out"
    with Journal(output, IDENTITY, resume=False):
        for resume in (False, True):
            with pytest.raises(RunError, match="is writing here"):
                check_output(output, IDENTITY, resume=resume)
            with pytest.raises(RunError, match="is writing here"):
                Journal(output, IDENTITY, resume=resume)
    with pytest.raises(RunError, match="continue it with --resume"):
        check_output(output, IDENTITY, resume=False)


@pytest.mark.parametrize("name", ["x" * 240, "x" * 256, "no/dir/out.jsonl", ".", ".."])
def test_paths_that_cannot_be_written(tmp_path, name):
    with pytest.raises((RunError, MissingFileError), match=r"too long|no such folder|is a folder"):
        check_output(tmp_path / name, IDENTITY, resume=False)
    assert not journal_folder(tmp_path / name).parent.joinpath("x").exists()
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_of_a_job_are_never_removed(tmp_path):
    """A folder of the journal's name, links, and a report are refused before anything is done."""
    output, foreign = tmp_path / "out.jsonl", tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")

    def refused(match: str) -> None:
        for resume in (False, True):
            with pytest.raises(RunError, match=match):
                check_output(output, IDENTITY, resume=resume)
            with pytest.raises(RunError, match=match):
                Journal(output, IDENTITY, resume=resume)

    parts = journal_folder(output)
    foreign.rename(parts)
    refused(r"holds 'thesis\.txt', which no job wrote")
    (parts / "thesis.txt").unlink()
    (parts / "merged").mkdir()
    refused("holds 'merged'")
    (parts / "merged").rmdir()
    parts.rename(foreign)
    (foreign / "rows.jsonl").write_text("")
    parts.symlink_to(foreign)
    refused("is a link, but jobs keep")
    assert [path.name for path in foreign.iterdir()] == ["rows.jsonl"]
    parts.unlink()
    output.symlink_to(tmp_path / "nowhere")
    refused("nowhere, which is missing")
    output.unlink()
    report_file(output).write_text('{"mine": 1}')
    refused("is not the report of a job")
    assert report_file(output).read_text() == '{"mine": 1}'


def test_a_file_added_during_the_job_stays(tmp_path):
    """The job ends, and its folder stays with that file alone."""
    (tmp_path / "out.jsonl.parts").mkdir()
    added = tmp_path / "out.jsonl.parts" / "thesis.txt"
    work = recorded_job.recorded_job(tmp_path, rows=2)
    with contextlib.closing(CompileClock()) as clock:
        for _ in work.run(clock):
            added.write_text("precious")
    assert list(added.parent.iterdir()) == [added]
    assert work.output.exists()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("out.jsonl", b"of another program", "another program wrote this file .* move it"),
        ("out.jsonl.parts/rows.jsonl", b"", "was changed by another program"),
        ("out.jsonl.parts/rows.jsonl", b"[1]" + b" " * 4096, "was changed by another program"),
        ("out.jsonl.parts/rows.jsonl", None, "was removed or replaced while the job ran"),
        ("out.jsonl.parts", None, "was removed or replaced while the job ran"),
    ],
)
def test_files_that_others_change_during_the_job(tmp_path, name, content, why):
    """Nothing of theirs is overwritten or taken for a row, and the job can be run again."""
    work, path = recorded_job.recorded_job(tmp_path), tmp_path / name
    expected = run(work)
    work.output.unlink()
    report_file(work.output).unlink()
    with contextlib.closing(CompileClock()) as clock:
        rows = recorded_job.recorded_job(tmp_path).run(clock)
        next(rows)
        if path.is_dir():
            shutil.rmtree(path)
        elif content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        with pytest.raises((RunError, DataError), match=why):
            list(rows)
    if name == "out.jsonl":
        with pytest.raises(RunError, match=why):
            run(recorded_job.recorded_job(tmp_path))
        assert path.read_bytes() == content
    if content:
        path.unlink()
    assert run(recorded_job.recorded_job(tmp_path)) == expected
