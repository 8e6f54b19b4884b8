"""Rows with errors: their file, another try of them, and jobs without one success."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_job import RecordedEngine, run

from jaxllm.batch.job.job import Job, explained
from jaxllm.batch.job.journal import check_output
from jaxllm.batch.rows import BatchOutput, RawRow, error_output
from jaxllm.batch.tables import ColumnChoice, read_source
from jaxllm.common.errors import InputError, RunError

IDENTITY = {"--model": "m", "--max-new-tokens": 4, "--top-k": 5}


class FailingEngine(RecordedEngine):
    """Answers rows, except for those whose prompts hold a word."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self._word = word
        self.asked: list[int] = []

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        for row in rows:
            self.asked.append(row.index)
            if self._word in row.raw["prompt"]:
                output = error_output(row, InputError(f"prompt: {self._word} is too long"))
                self.counts.add_output(output)
                yield output
            else:
                yield from super().answer([row])


def job(folder: Path, word: str, output: str = "out.csv", **options: Any) -> Job:
    rows = folder / "rows.csv"
    if not rows.exists():
        cells = "".join(f"{i},no {i},{i}.0\n" for i in range(10))
        rows.write_text(f"id,question,price\n{cells}")
    identity = {**IDENTITY, **options.pop("changed", {})}
    engine: Any = FailingEngine(word)
    choice = ColumnChoice(prompt="question", keep="all")
    return Job(engine, read_source(rows, choice), folder / output, identity, **options)


RETRY = {"resume": True, "retry": True}


@pytest.mark.parametrize("output", ["out.csv", "out.jsonl", "out.parquet"])
def test_failed_rows_are_tried_again(tmp_path, output):
    """Twice, with another limit; everything else stays to the byte."""
    expected = run(job(tmp_path, "nothing", "whole" + output))
    first = run(job(tmp_path, "5", output))
    assert first != expected
    errors = tmp_path / f"{output}.errors.jsonl"
    (line,) = map(json.loads, errors.read_text().splitlines())
    assert line == {
        "id": "5",
        "question": "no 5",
        "price": "5.0",
        "failed_row": {
            "row": 5,
            "id": "5",
            "error": "line 7: prompt: 5 is too long",
            "error_kind": "InputError",
        },
    }
    again = job(tmp_path, "5", output, **RETRY)
    assert run(again) == first
    assert again.engine.asked == [5]
    with pytest.raises(RunError, match="--top-k: was 5"):
        run(job(tmp_path, "nothing", output, changed={"--top-k": 6}, **RETRY))
    last = job(tmp_path, "nothing", output, changed={"--max-new-tokens": 9}, **RETRY)
    assert run(last) == expected
    assert last.engine.asked == [5]
    assert last.report.errors == {}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == [
        output,
        f"{output}.report.json",
    ]
    identity = {**last.identity}
    assert check_output(tmp_path / output, identity, resume=True, retry=True)


def test_an_unfinished_job_tries_again_too(tmp_path):
    work = job(tmp_path, "1")
    rows = work.run(clock=_clock())
    for _ in range(4):
        next(rows)
    rows.close()
    with pytest.raises(RunError, match="--max-new-tokens: was 4"):
        run(job(tmp_path, "x", changed={"--max-new-tokens": 9}, resume=True))
    again = job(tmp_path, "x", changed={"--max-new-tokens": 9}, **RETRY)
    run(again)
    assert again.engine.asked == [1, *range(4, 10)]
    assert again.report.errors == {}


@pytest.mark.parametrize("word", ["nothing", "5"])
def test_another_limit_is_not_the_setting_of_the_job(tmp_path, word):
    """The report names the limit of all rows, and so does a later --resume."""
    run(job(tmp_path, "5"))
    settings = json.loads((tmp_path / "out.csv.report.json").read_text())["settings"]
    for limit in (9, 11):
        if word == "5" or limit == 9:
            run(job(tmp_path, word, changed={"--max-new-tokens": limit}, **RETRY))
    report = json.loads((tmp_path / "out.csv.report.json").read_text())
    assert report["settings"] == settings
    again = job(tmp_path, "x", resume=True)
    assert check_output(tmp_path / "out.csv", again.identity, resume=True)
    other = job(tmp_path, "x", changed={"--max-new-tokens": 9}, resume=True)
    with pytest.raises(RunError, match="--max-new-tokens: was 4 when this job began, and is 9"):
        check_output(tmp_path / "out.csv", other.identity, resume=True)


def test_the_errors_are_an_input(tmp_path):
    run(job(tmp_path, "5"))
    choice = ColumnChoice(prompt="question", keep=("price",))
    source = read_source(tmp_path / "out.csv.errors.jsonl", choice)
    assert source.row(0).raw == {"id": "5", "prompt": "no 5"}
    assert source.kept(0) == {"price": "5.0"}
    assert source.unread == ["failed_row"]
    everything = ColumnChoice(prompt="question", keep="all")
    kept = read_source(tmp_path / "out.csv.errors.jsonl", everything).kept(0)
    assert "failed_row" not in kept


def test_a_job_without_a_success_leaves_its_errors_only(tmp_path):
    for _ in range(2):  # nothing blocks another try
        work = job(tmp_path, "no")
        with pytest.raises(FileNotFoundError):
            run(work)
        assert work.report.successes == 0
        assert explained(work.report.errors, work.report.first_errors) == [
            "  10 InputError, the first in line 2: prompt: no is too long"
        ]
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["out.csv.errors.jsonl", "rows.csv"]
    assert b"error" in run(job(tmp_path, "5"))


def test_what_retrying_needs(tmp_path):
    run(job(tmp_path, "5"))
    shutil.rmtree(tmp_path / "out.csv.parts")
    with pytest.raises(RunError, match=r"--retry-errors: .*parts is gone"):
        run(job(tmp_path, "x", **RETRY))


def test_another_output_is_not_replaced(tmp_path):
    run(job(tmp_path, "5"))
    (tmp_path / "out.csv").write_text("mine")
    with pytest.raises(RunError, match=r"out\.csv has changed since the job wrote it"):
        run(job(tmp_path, "x", **RETRY))
    assert (tmp_path / "out.csv").read_text() == "mine"
    (tmp_path / "other.csv.errors.jsonl").write_text("mine\n")
    with pytest.raises(RunError, match="is no file of a job's errors"):
        run(job(tmp_path, "x", "other.csv"))


def test_corrections_in_the_file_of_errors_are_not_replaced(tmp_path):
    run(job(tmp_path, "5"))
    errors = tmp_path / "out.csv.errors.jsonl"
    errors.write_text(errors.read_text().replace("no 5", "yes"))
    with pytest.raises(RunError, match=r"errors\.jsonl has changed .*run it as an --input"):
        run(job(tmp_path, "x", **RETRY))
    assert '"yes"' in errors.read_text()


def test_the_job_is_checked_without_its_output(tmp_path):
    """The results of another table must not be mixed with those that the journal has."""
    run(job(tmp_path, "5"))
    (tmp_path / "out.csv").unlink()
    rows = tmp_path / "rows.csv"
    rows.write_text(rows.read_text() + "another,row,1\n")
    with pytest.raises(RunError, match="input: has other rows than when this job began"):
        run(job(tmp_path, "x", **RETRY))


@pytest.mark.parametrize("line", ["5", "[]", "{}", "mine"])
def test_files_that_are_no_file_of_errors(tmp_path, line):
    (tmp_path / "out.csv.errors.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match="is no file of a job's errors"):
        run(job(tmp_path, "x"))


def test_empty_settings_are_left_out_of_the_inputs(tmp_path):
    (tmp_path / "rows.csv").write_text("id,prompt,max_new_tokens,failed\na,,,yes\nb,x,5,\n")
    source = read_source(tmp_path / "rows.csv")
    assert source.inputs(0) == {"id": "a", "prompt": "", "failed": "yes"}
    assert source.inputs(1) == {"id": "b", "prompt": "x", "max_new_tokens": 5, "failed": ""}


def test_errors_of_requests_are_an_input(tmp_path):
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/x", "body": {}} for name in "ab"]
    failed = [{"id": line["custom_id"], **line, "failed_row": {"row": 0}} for line in lines]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in failed))
    source = read_source(tmp_path / "in.jsonl")
    assert [source.row(index).raw for index in range(2)] == lines


def _clock() -> Any:
    from jaxllm.common.compiling import CompileClock

    return CompileClock()


def test_the_inputs_of_rows_without_a_prompt(tmp_path: Path):
    """All cells of a row, except where it has none."""
    (tmp_path / "rows.csv").write_text("id,question,price\na,ok,1\nb,,2\nragged\n")
    source = read_source(tmp_path / "rows.csv", ColumnChoice(prompt="question"))
    assert source.inputs(1) == {"id": "b", "question": "", "price": "2"}
    assert source.inputs(2) == {}
    assert source.table.text(2) == "ragged\n"
