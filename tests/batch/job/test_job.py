"""Files of rows: order, bad rows, the journal, what is resumed and what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conformance_runs import DATA

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch.job.job import Job
from jaxllm.batch.job.journal import Journal, is_finished, read_rows, with_checksum
from jaxllm.batch.tables import read_source
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import DataError, MissingFileError, RunError

MODEL, TOKENIZER = jaxllm.load(DATA / "models" / "s_llama_tok")
SETTINGS = {"--model": "s_llama_tok", "--temperature": 0.5}


def job(folder: Path, rows: list[Any], *, resume=False, settings=SETTINGS, **fields) -> Job:
    source = folder / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    source.write_text("\n".join(lines) + "\n")
    engine = BatchGenerator(MODEL, TOKENIZER, slots=4, **{"max_new_tokens": 6, **fields})
    return Job(engine, read_source(source), folder / "out.jsonl", settings, resume=resume)


def run(work: Job, *, until: int | None = None) -> list[dict[str, Any]]:
    """Runs a job; `until` leaves it after so many rows, as a crash would."""
    with contextlib.closing(CompileClock()) as clock:
        outputs = work.run(clock)
        for done, _ in enumerate(outputs, start=1):
            if done == until:
                outputs.close()  # as an exception in the caller would
                return []
    return [json.loads(line) for line in work.output.read_text().splitlines()]


ROWS = [
    {"id": f"r{i}", "prompt": "one two three"[: 3 + i], "max_new_tokens": 2 + i} for i in range(9)
]


@pytest.mark.ci
def test_rows_keep_ids_and_order(tmp_path):
    rows = [*ROWS, {"prompt": "x"}, "", {"input_ids": [5, 6], "num_return_sequences": 2}]
    rows[-1] |= {"do_sample": True, "id": 7}
    lines = run(job(tmp_path, rows))
    assert [line["id"] for line in lines] == [*(row["id"] for row in ROWS), 10, 7]
    assert list(lines[0]) == ["id", "row", "text", "output_ids", "finish_reason"]
    assert all(line["text"] == TOKENIZER.decode(line["output_ids"], True) for line in lines[:-1])
    assert [len(ids) for ids in (lines[-1]["text"], lines[-1]["finish_reason"])] == [2, 2]
    assert not (tmp_path / "out.jsonl.parts").exists()


@pytest.mark.ci
def test_bad_rows_are_records_and_the_others_go_on(tmp_path):
    bad = {
        "not JSON": "{",
        "not an object": "[1]",
        "exactly one of": {"id": "a", "prompt": "x", "input_ids": [1]},
        "found none": {"id": "b"},
        "not in the vocabulary": {"input_ids": [10**6]},
        "a list of token ids": {"input_ids": []},
        "prompt: expected a string": {"prompt": 5},
        "a list of messages": {"messages": "hello"},
        "no effect without `do_sample`": {"prompt": "x", "temperature": 0.3},
        "`max_new_tokens` must be": {"prompt": "x", "max_new_tokens": 0},
        "a string or an integer": {"id": [1], "prompt": "x"},
        "seed: expected": {"prompt": "x", "seed": -1},
        "not for rows of a batch": {"prompt": "x", "output_scores": True},
        "appears twice": '{"prompt": "x", "prompt": "y"}',
        "no token of the vocabulary": {"prompt": "x", "stop_strings": ["東"]},
        "forbid every token": {"prompt": "x", "suppress_tokens": list(range(len(TOKENIZER)))},
    }
    rows = [row for pair in zip(bad.values(), [ROWS[0]] * len(bad), strict=True) for row in pair]
    work = job(tmp_path, rows)
    lines = run(work)
    assert len(lines) == len(rows)
    for number, (why, line) in enumerate(zip(bad, lines[::2], strict=True)):
        assert why in line["error"]
        assert line["error"].startswith(f"line {2 * number + 1}: ")
        assert line["row"] == 2 * number
    assert [line["id"] for line in lines[:8:2]] == [1, 3, "a", "b"]
    good = [{**line, "row": 0} for line in lines[1::2]]
    assert all(line == good[0] for line in good)
    assert "error" not in lines[1]
    report = json.loads(work.report_path.read_text())
    assert sum(report["errors"].values()) == len(bad)
    assert report["errors"]["DataError"] == 3
    assert report["errors"]["NonFiniteError"] == 1


@pytest.mark.ci
def test_a_stopped_job_goes_on(tmp_path):
    fields = {"do_sample": True, "temperature": 0.9}
    full = tmp_path / "whole"
    full.mkdir()
    expected = run(job(full, ROWS, **fields))
    for until in (2, 3):
        run(job(tmp_path, ROWS, resume=True, **fields), until=until)
        assert not (tmp_path / "out.jsonl").exists()
    work = job(tmp_path, ROWS, resume=True, **fields)
    assert run(work) == expected
    assert work.resumed == 5
    report = json.loads(work.report_path.read_text())
    assert (report["rows"], report["resumed"], report["run"]["rows"]) == (9, 5, 4)
    assert report["new_lengths"]["total"] == sum(len(line["output_ids"]) for line in expected)
    assert ("rows", "9, 5 of them before") in work.report.table()


@pytest.mark.ci
def test_a_torn_last_line_is_repaired(tmp_path):
    run(job(tmp_path, ROWS, resume=True), until=4)
    part = tmp_path / "out.jsonl.parts" / "rows.jsonl"
    data = part.read_bytes()
    part.write_bytes(data[:-9])
    work = job(tmp_path, ROWS, resume=True)
    lines = run(work)
    assert work.resumed == 3
    assert [line["id"] for line in lines] == [row["id"] for row in ROWS]


@pytest.mark.parametrize("at", [-40, -9, 2, 12, 22])
def test_a_damaged_line_is_named(tmp_path, at):
    """One bit, wherever it is, also where the line stays JSON and the record one of the job."""
    part = tmp_path / "rows.jsonl"
    record = {"job": "j", "index": 0, "facts": {"prompt_tokens": 1}, "line": {"text": "abcdefgh"}}
    lines = [with_checksum(record), with_checksum({**record, "index": 1})]
    part.write_bytes(b"".join(lines))
    assert read_rows(part, "j")[0].keys() == {0, 1}
    damaged = bytearray(lines[1])
    damaged[at] ^= 1
    part.write_bytes(lines[0] + damaged)
    with pytest.raises(DataError, match="line 2: is damaged"):
        read_rows(part, "j")


def test_merging_is_repeated_after_a_crash_in_it(tmp_path):
    """A crash in the merge, then between the new name of the output and the clean-up."""
    run(job(tmp_path, ROWS, resume=True), until=9)
    parts, kept = tmp_path / "out.jsonl.parts", tmp_path / "kept"
    (parts / "merged").write_bytes(b"half")
    shutil.copytree(parts, kept)
    lines = run(job(tmp_path, ROWS, resume=True))
    assert [line["id"] for line in lines] == [row["id"] for row in ROWS]
    kept.rename(parts)
    assert run(job(tmp_path, ROWS, resume=True)) == lines


def test_what_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match=r"none\.jsonl"):
        read_source(tmp_path / "none.jsonl")
    run(job(tmp_path, ROWS), until=2)
    for changes, name in (
        ({"settings": {**SETTINGS, "--temperature": 0.6}}, "--temperature: was 0.5"),
        ({"settings": {**SETTINGS, "--top-k": 6}}, "--top-k: was None"),
        ({"rows": ROWS[:-1]}, "input: has other rows "),
    ):
        with pytest.raises(RunError, match=name):
            run(job(tmp_path, **{"rows": ROWS, "resume": True, **changes}))
    with pytest.raises(RunError, match="holds an unfinished job"):
        run(job(tmp_path, ROWS))
    assert len(run(job(tmp_path, ROWS, resume=True))) == len(ROWS)
    with pytest.raises(RunError, match="exists already"):
        run(job(tmp_path, ROWS))
    finished = job(tmp_path, ROWS)
    assert is_finished(finished.output, finished.identity, resume=True)
    with pytest.raises(RunError, match="--top-k: was None"):
        is_finished(finished.output, {**finished.identity, "--top-k": 6}, resume=True)
    finished.report_path.unlink()
    with pytest.raises(RunError, match="no job wrote it"):
        is_finished(finished.output, finished.identity, resume=True)


def test_one_process_a_job(tmp_path):
    with (
        Journal(tmp_path / "out", {}, resume=False),
        pytest.raises(RunError, match="is writing here"),
    ):
        Journal(tmp_path / "out", {}, resume=True)
