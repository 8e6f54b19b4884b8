"""A job answers a file of rows into a file of outputs, and can be resumed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.job import process_notes as notes
from jaxllm.batch.job.journal import Journal, journal_folder, report_file
from jaxllm.batch.job.report import Report, Run, lengths
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.common.atomic_file import write_whole
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import DataError, JaxLLMError, MissingFileError, RunError
from jaxllm.common.strict_json import parse_json
from jaxllm.parallel.processes import together

_BOM = b"\xef\xbb\xbf"


class Input(NamedTuple):
    """Input file: one JSON object per line."""

    path: Path
    lines: list[tuple[int, bytes]]
    """Lines that are not blank, with their numbers from 1 on."""
    sha256: str

    @staticmethod
    def read(path: Path) -> Input:
        """Reads the lines of a file.

        Raises:
            MissingFileError, DataError: the file does not exist or cannot be read.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise MissingFileError(f"{path}: no such file") from None
        except OSError as failure:
            raise DataError(f"{path}: cannot be read ({failure.strerror})") from failure
        lines = enumerate(data.removeprefix(_BOM).split(b"\n"), start=1)
        kept = [(number, line) for number, line in lines if line.strip()]
        return Input(path, kept, hashlib.sha256(data).hexdigest())

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that a resumed job compares."""
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


class Job:
    """Answers all rows of a file; the output has their order.

    Rows are kept in a `Journal` as they end, so that a job that was killed goes on where it was. A
    row that cannot be answered is a line with an `error` (and the number of its line).

    With several JAX processes, each has a `Job` and generates its share of the rows that are not
    done; process 0 merges. The processes synchronise only when the journal is opened and at the
    end.

    Args:
        engine: its settings are those that `settings` says.
        settings: all settings that outputs depend on, besides the input itself.
        resume: go on with a job that was stopped.

    Raises:
        RunError: raised by `run`, see `Journal`; or another process failed.
    """

    def __init__(
        self,
        engine: BatchGenerator,
        source: Input,
        output: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
    ) -> None:
        self.engine, self.source, self.output = engine, source, output
        self.settings = {**settings, **source.settings}
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

    def run(self, clock: CompileClock) -> Iterator[BatchOutput]:
        """Yields outputs as rows finish, journaled first. The output file exists after the last."""
        folder = self.journal_path
        with self._open() as journal, notes.failure_left(folder, self.process):
            run = yield from self._answer(journal, clock)
            if self.process == 0:
                others = notes.wait_for_others(folder, self.processes)
                if others:
                    journal.read_parts()
                self._finish(journal, Run.total([run.to_note(), *others]))
                # Last: a job stopped before this still has all its rows and is merged again.
                journal.remove()
        if self.process > 0:
            notes.leave(folder, self.process, run.to_note())
            notes.wait_for_merge(folder)

    def _open(self) -> Journal:
        """Opens the journal: process 0 creates it, then the others open it. All processes see the
        same finished rows, since none continues before all have read them."""
        where = (self.output, self.settings)

        def begin() -> Journal | None:
            if self.process > 0:
                return None
            journal = Journal(*where, resume=self._resume)
            notes.forget(journal.folder)
            return journal

        first = together(begin, RunError)
        return together(
            lambda: first or Journal(*where, resume=True, process=self.process), RunError
        )

    def _answer(self, journal: Journal, clock: CompileClock) -> Generator[BatchOutput, None, Run]:
        """Generates this process's share of the rows."""
        self.resumed = len(journal.done)
        todo = [i for i in range(len(self.source.lines)) if i not in journal.done]
        mine = share(todo, self.process, self.processes)
        self.share = len(mine)
        start, compiled = time.monotonic(), clock.seconds
        programs, cached = clock.programs, clock.cached
        for output in self.engine.answer(map(self.source.row, mine)):
            journal.add(output.index, self._line(output), output.prompt_tokens)
            yield output
        return Run(
            counts=self.engine.counts,
            memory=self.engine.memory,
            seconds=time.monotonic() - start,
            compile_seconds=clock.seconds - compiled,
            programs=clock.programs - programs,
            programs_from_cache=clock.cached - cached,
        )

    def _line(self, output: BatchOutput) -> dict[str, Any]:
        line = output.to_dict()
        if output.error is None:
            return line
        number = self.source.lines[output.index][0]
        named = output.error.startswith(f"line {number}:")
        error = output.error if named else f"line {number}: {output.error}"
        return {**line, "error": error, "line": number}

    def _finish(self, journal: Journal, run: Run) -> None:
        records = journal.merge(len(self.source.lines))
        self.report = Report(
            input=str(self.source.path),
            output=str(self.output),
            settings=self.settings,
            resumed=self.resumed,
            processes=self.processes,
            run=run,
            **lengths(records),
        )
        write_whole(self.report_path, self.report.to_json())


def share(rows: Sequence[int], process: int, processes: int) -> Sequence[int]:
    """Rows of one process: dealt out round-robin.

    >>> [share([0, 1, 4, 7, 8], process, 2) for process in (0, 1)]
    [[0, 4, 8], [1, 7]]
    """
    return rows[process::processes]
