"""A job whose outputs are known beforehand, so that it only works on files, and its kills.

Run as a script it answers the job once for each operation given, dies there, resumes, and compares
the output. It forks a process for each; so it must not have used JAX before.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from file_faults import KILLED, dying_at

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.job import journal
from jaxllm.batch.job.job import Job
from jaxllm.batch.job.journal import report_file
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.batch.slot_pool import BatchCounts
from jaxllm.batch.tables import read_source
from jaxllm.common.compiling import CompileClock

IDENTITY = {"--model": "m", "model weights": "0123", "--top-k": 5}


class RecordedEngine:
    """Yields recorded outputs in another order than that of the rows."""

    memory = ()

    def __init__(self) -> None:
        self.counts = BatchCounts()

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        for row in sorted(rows, key=lambda row: row.index % 3):
            text = f"{row.raw['prompt']} {'x' * 40}"
            output = BatchOutput(row.index, row.row_id, ([row.index, 2],), (text,), ("eos",), 3)
            self.counts.add_output(output)
            yield output


class EngineWithSizes(RecordedEngine, BatchGenerator):
    """Saves sizes of programs before the rows, and once more, as when memory runs out."""

    def keep_pools(
        self, kept: Mapping[str, Any], save: Callable[[dict[str, Any]], object], row: Any
    ) -> None:
        assert kept.get("pools") in (None, [4], [2])
        self._save = save

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        for slots in (4, 2):
            self._save({"pools": [slots]})
        yield from super().answer(rows)


def recorded_job(folder: Path, rows: int = 18, *, name: str = "row", resume: bool = True) -> Job:
    source = folder / f"{name}.jsonl"
    if not source.exists():
        lines = (json.dumps({"id": f"{name}-{i}", "prompt": f"{name} {i}"}) for i in range(rows))
        source.write_text("\n".join(lines) + "\n")
    engine: Any = EngineWithSizes()
    return Job(engine, read_source(source), folder / "out.jsonl", IDENTITY, resume=resume)


def run(work: Job) -> bytes:
    """The output of a job that runs to its end."""
    with contextlib.closing(CompileClock()) as clock:
        for _ in work.run(clock):
            pass
    return work.output.read_bytes()


def die_and_resume(folder: Path, operation: int, expected: bytes) -> bool:
    """Runs a job that dies at an operation, and resumes it; False if it ended before.

    After each death another job on the same output is refused, or has no row of this one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pid = os.fork()
    if pid == 0:
        work = recorded_job(folder)
        with dying_at(operation):
            run(work)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), code
    output, report = folder / "out.jsonl", report_file(folder / "out.jsonl")
    parts = folder / "out.jsonl.parts"
    if output.exists() and not (parts / "job.json").exists():  # the job had ended
        assert output.read_bytes() == expected, operation
        assert json.loads(report.read_bytes())["rows"] == expected.count(b"\n")
        output.unlink()
        other = recorded_job(folder, name="other", resume=False)
        assert b"row-" not in run(other), operation
    else:
        assert run(recorded_job(folder)) == expected, operation
    assert not parts.exists(), operation
    return code == KILLED


def main(folder: Path, step: int) -> None:
    journal.COMMIT_ROWS = 2
    (folder / "whole").mkdir()
    pid = os.fork()
    if pid == 0:  # JAX starts in the child only
        run(recorded_job(folder / "whole"))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    expected = (folder / "whole" / "out.jsonl").read_bytes()
    operation = 1
    while die_in_child(folder / "killed", operation, expected):
        operation += step
    print(operation)


def die_in_child(folder: Path, operation: int, expected: bytes) -> bool:
    pid = os.fork()
    if pid == 0:
        killed = die_and_resume(folder, operation, expected)
        os._exit(KILLED if killed else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED), f"operation {operation}: {code}"
    return code == KILLED


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
