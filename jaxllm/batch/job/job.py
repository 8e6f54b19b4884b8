"""A job answers the rows of a source into a file of outputs, and can be resumed."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.job import process_notes as notes
from jaxllm.batch.job.inputs.source import Source
from jaxllm.batch.job.job_files import journal_folder, report_file
from jaxllm.batch.job.journal import Journal
from jaxllm.batch.job.outputs import output_writer
from jaxllm.batch.job.report import Report, RunCounters, row_facts, row_statistics
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.common.atomic_file import write_whole
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import RunError, naming_file
from jaxllm.parallel.processes import in_all_processes


class RowEngine(Protocol):
    """Engine of a job: `BatchGenerator`, or one that scores, embeds, and so on.

    Attributes:
        counts: counters of the current run.
        memory: predicted memory of each pool of slots.
    """

    counts: BatchCounts

    @property
    def memory(self) -> Sequence[Prediction]: ...

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        """Outputs of some rows, in the order in which they end."""
        ...


class Job:
    """Answers all rows of a source into a file; the output has their order.

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
        engine: RowEngine,
        source: Source,
        output: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
    ) -> None:
        self.engine, self.source, self.output = engine, source, output
        self.identity = {**identity, **source.identity}
        self._resume, self._write = resume, output_writer(output)
        self.process, self.processes = jax.process_index(), jax.process_count()
        self.resumed = 0
        """Rows that earlier runs answered."""
        self.share = len(source)
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

        created = in_all_processes(create, RunError)
        return in_all_processes(
            lambda: created or Journal(*arguments, resume=True, process=self.process), RunError
        )

    def _answer(
        self, journal: Journal, clock: CompileClock
    ) -> Generator[BatchOutput, None, RunCounters]:
        """Generates this process's share of the rows."""
        self.resumed = len(journal.done)
        missing = [i for i in range(len(self.source)) if i not in journal.done]
        rows = rows_of_process(missing, self.process, self.processes)
        self.share = len(rows)
        watch = RunWatch(clock)
        for output in self.engine.answer(map(self.source.row, rows)):
            journal.add(output.index, self.source.output_line(output), row_facts(output))
            yield output
        return watch.counters(self.engine)

    def _finish(self, journal: Journal, run: RunCounters) -> None:
        journal.merge(len(self.source), self._write)
        records = journal.records(len(self.source))
        self.report = Report(
            input=self.source.name,
            output=str(self.output),
            settings=self.identity,
            resumed=self.resumed,
            processes=self.processes,
            run=run,
            **row_statistics(record["facts"] for record in records),
        )
        with naming_file(self.report_path, RunError, "written"):
            write_whole(self.report_path, self.report.to_json())


class RunWatch:
    """Measures one run of an engine, from when it is made.

    Args:
        clock: counts compilations.
    """

    def __init__(self, clock: CompileClock) -> None:
        self._clock, self._start = clock, time.monotonic()
        self._before = clock.seconds, clock.programs, clock.cached

    def counters(self, engine: RowEngine) -> RunCounters:
        """The counters of the run, now that it has ended."""
        seconds, programs, cached = self._before
        return RunCounters(
            counts=engine.counts,
            memory=engine.memory,
            seconds=time.monotonic() - self._start,
            compile_seconds=self._clock.seconds - seconds,
            programs=self._clock.programs - programs,
            programs_from_cache=self._clock.cached - cached,
        )


def rows_of_process(rows: Sequence[int], process: int, processes: int) -> Sequence[int]:
    """Rows of one process: dealt out round-robin.

    >>> [rows_of_process([0, 1, 4, 7, 8], process, 2) for process in (0, 1)]
    [[0, 4, 8], [1, 7]]
    """
    return rows[process::processes]
