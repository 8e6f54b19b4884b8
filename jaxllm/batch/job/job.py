"""A job answers a file of rows into a file of outputs, and can be resumed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.job import process_notes as notes
from jaxllm.batch.job.job_files import journal_folder, report_file
from jaxllm.batch.job.journal import Journal
from jaxllm.batch.job.report import Report, RunCounters, row_statistics
from jaxllm.batch.rows import PROMPT_KEYS, BatchOutput, RawRow
from jaxllm.common.atomic_file import write_whole
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import DataError, JaxLLMError, MissingFileError, RunError, naming_file
from jaxllm.common.messages import quoted, shortened
from jaxllm.common.strict_json import parse_json
from jaxllm.parallel.processes import together

_BOM = b"\xef\xbb\xbf"
OTHER_FORMATS = {
    **dict.fromkeys((".csv", ".tsv"), "a table of text"),
    **dict.fromkeys((".parquet", ".arrow", ".feather", ".xlsx", ".xls"), "a binary table"),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"), "compressed"),
    **dict.fromkeys((".safetensors", ".gguf", ".bin", ".pt", ".npy", ".npz"), "a file of arrays"),
}
"""Suffixes of files that are not JSONL."""


class InputFile(NamedTuple):
    """Input file: one JSON object per line."""

    path: Path
    lines: list[tuple[int, bytes]]
    """Lines that are not blank, with their numbers from 1 on."""
    sha256: str

    @staticmethod
    def read(path: Path) -> InputFile:
        """Reads the lines of a file.

        Raises:
            MissingFileError, DataError: the file does not exist or cannot be read, or is of
                another format.
        """
        other_format = OTHER_FORMATS.get(path.suffix.lower())
        if other_format is not None:
            raise DataError(f"{path}: is {other_format}; write its rows as JSONL, {_EXAMPLE}")
        try:
            with naming_file(path, DataError, "read"):
                data = path.read_bytes()
        except DataError as failure:
            if isinstance(failure.__cause__, FileNotFoundError):
                raise MissingFileError(f"{path}: no such file") from None
            raise
        lines = enumerate(data.removeprefix(_BOM).split(b"\n"), start=1)
        kept = [(number, line) for number, line in lines if line.strip()]
        return InputFile(path, kept, hashlib.sha256(data).hexdigest())

    @property
    def identity(self) -> dict[str, Any]:
        """The part of a job's identity that is its input."""
        return {"input": self.sha256, "rows": len(self.lines)}

    def row(self, index: int) -> RawRow:
        """Row number `index`, from 0 on; an error in its place if its line is not an object."""
        number, line = self.lines[index]
        try:
            raw = parse_json(line, source=f"line {number}", error=DataError)
            if not isinstance(raw, Mapping):
                raise DataError(f"line {number}: is {type(raw).__name__}, not an object")
        except JaxLLMError as error:
            raw = error
        return RawRow(index, number, raw)

    def check_rows(self) -> None:
        """Checks the rows as a whole; a single wrong row becomes a record with an error.

        Raises:
            DataError: there are no rows, none of them has a prompt, or two have the same id.
        """
        if not self.lines:
            raise DataError(f"{self.path}: has no rows")
        line_of_id: dict[str | int, int] = {}
        has_prompt = False
        for index, (number, _) in enumerate(self.lines):
            row = self.row(index)
            has_prompt |= isinstance(row.raw, Mapping) and bool(row.raw.keys() & PROMPT_KEYS)
            other_number = line_of_id.setdefault(row.row_id, number)
            if other_number != number:
                raise DataError(
                    f"{self.path}: lines {other_number} and {number} have the same id, "
                    f"{quoted(row.row_id)} (a line without an id has its number); give each its own"
                )
        if not has_prompt:
            first = self.row(0).raw
            found = (
                shortened(str(first), 200)
                if isinstance(first, JaxLLMError)
                else f"line {self.lines[0][0]} has {shortened(', '.join(first) or 'no keys')}"
            )
            raise DataError(
                f"{self.path}: no line has a prompt, messages or input_ids ({found}); write JSONL, "
                f"{_EXAMPLE}"
            )


_EXAMPLE = 'such as {"prompt": "Hello"} on each line'


class Job:
    """Answers all rows of a file; the output has their order.

    Rows are kept in a `Journal` as they end, so that a job that was killed goes on where it was. A
    row that cannot be answered is a line with an `error` (and the number of its line).

    With several JAX processes, each has a `Job` and generates its share of the rows that are not
    done; process 0 merges. The processes communicate only when the journal is opened; at the end
    they wait for each other's files.

    Args:
        engine: its settings are those of `identity`.
        identity: everything that outputs depend on, besides the input itself.
        resume: go on with a job that was stopped.

    Raises:
        RunError, DataError: raised by `run`, see `Journal`; or another process failed.
    """

    def __init__(
        self,
        engine: BatchGenerator,
        source: InputFile,
        output: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
    ) -> None:
        self.engine, self.source, self.output = engine, source, output
        self.identity = {**identity, **source.identity}
        self._resume = resume
        self.process, self.processes = jax.process_index(), jax.process_count()
        self.resumed = 0
        """Rows that earlier runs answered."""
        self.share = len(source.lines)
        """Number of rows of this process; set when `run` starts."""

    @property
    def report_path(self) -> Path:
        return report_file(self.output)

    @property
    def journal_path(self) -> Path:
        return journal_folder(self.output)

    def run(self, clock: CompileClock) -> Generator[BatchOutput, None, None]:
        """Yields outputs as rows finish, journaled first. The output file exists after the last."""
        folder = self.journal_path
        with self._open_journal() as journal, notes.noting_failure(folder, self.process):
            run = yield from self._answer(journal, clock)
            if self.process == 0:
                others = notes.wait_for_notes(folder, self.processes)
                if others:
                    journal.read_parts()
                self._finish(journal, RunCounters.total([run.to_note(), *others]))
                # Last: a job stopped before this still has all its rows and is merged again.
                journal.remove()
            else:
                notes.write_note(folder, self.process, run.to_note())
        if self.process > 0:
            notes.wait_for_merge(folder)

    def _open_journal(self) -> Journal:
        """Opens the journal: process 0 creates it, then the others open it. All processes see the
        same finished rows, since none continues before all have read them."""
        arguments = (self.output, self.identity)

        def create() -> Journal | None:
            if self.process > 0:
                return None
            journal = Journal(*arguments, resume=self._resume)
            notes.remove_notes(journal.folder)
            return journal

        created = together(create, RunError)
        return together(
            lambda: created or Journal(*arguments, resume=True, process=self.process), RunError
        )

    def _answer(
        self, journal: Journal, clock: CompileClock
    ) -> Generator[BatchOutput, None, RunCounters]:
        """Generates this process's share of the rows."""
        self.resumed = len(journal.done)
        missing = [i for i in range(len(self.source.lines)) if i not in journal.done]
        rows = rows_of_process(missing, self.process, self.processes)
        self.share = len(rows)
        start, compile_seconds = time.monotonic(), clock.seconds
        programs, cached = clock.programs, clock.cached
        for output in self.engine.answer(map(self.source.row, rows)):
            journal.add(output.index, self._line(output), output.prompt_tokens)
            yield output
        return RunCounters(
            counts=self.engine.counts,
            memory=self.engine.memory,
            seconds=time.monotonic() - start,
            compile_seconds=clock.seconds - compile_seconds,
            programs=clock.programs - programs,
            programs_from_cache=clock.cached - cached,
        )

    def _line(self, output: BatchOutput) -> dict[str, Any]:
        """The line of an output; an error begins with the number of its line in the input."""
        line = output.to_dict()
        if output.error is None:
            return line
        number = self.source.lines[output.index][0]
        prefix = f"line {number}:"
        error = output.error if output.error.startswith(prefix) else f"{prefix} {output.error}"
        return {**line, "error": error, "line": number}

    def _finish(self, journal: Journal, run: RunCounters) -> None:
        records = journal.merge(len(self.source.lines))
        self.report = Report(
            input=str(self.source.path),
            output=str(self.output),
            settings=self.identity,
            resumed=self.resumed,
            processes=self.processes,
            run=run,
            **row_statistics(records),
        )
        with naming_file(self.report_path, RunError, "written"):
            write_whole(self.report_path, self.report.to_json())


def rows_of_process(rows: Sequence[int], process: int, processes: int) -> Sequence[int]:
    """Rows of one process: dealt out round-robin.

    >>> [rows_of_process([0, 1, 4, 7, 8], process, 2) for process in (0, 1)]
    [[0, 4, 8], [1, 7]]
    """
    return rows[process::processes]
