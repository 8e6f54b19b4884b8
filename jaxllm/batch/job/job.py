"""A job answers the rows of a source into a file of outputs, and can be resumed."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.job.journal import Journal, errors_file, report_file
from jaxllm.batch.job.report import Report, RunCounters, row_facts, row_statistics
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.batch.tables.columns import FAILED
from jaxllm.batch.tables.outputs import Line, OutputTable, encoded, output_writer
from jaxllm.batch.tables.source import Source
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import RunError, naming_file
from jaxllm.common.files import write_whole


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
    row that cannot be answered is a line with an `error`, and a line of the file of errors, which
    has its inputs. Without one success there is no output, only the file of errors.

    Args:
        engine: its settings are those of `identity`.
        identity: everything that outputs depend on, besides the input itself.
        resume: go on with a job that was stopped.
        retry: try the rows with errors again, see `Journal`.

    Raises:
        RunError, DataError: raised by `run`, see `Journal`.
    """

    def __init__(
        self,
        engine: RowEngine,
        source: Source,
        output: Path,
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
        retry: bool = False,
    ) -> None:
        self.engine, self.source, self.output = engine, source, output
        self.identity = {**identity, **source.identity}
        self._resume, self._retry = resume, retry
        self.report_path, self.errors_path = report_file(output), errors_file(output)
        self._write = output_writer(output)
        self.resumed = 0
        """Rows that earlier runs answered."""

    def run(self, clock: CompileClock) -> Generator[BatchOutput, None, None]:
        """Yields outputs as rows finish, journaled first. The output file exists after the last."""
        options = {"resume": self._resume, "retry": self._retry}
        with Journal(self.output, self.identity, **options) as journal:
            self.resumed = len(journal.done)
            missing = [i for i in range(len(self.source)) if i not in journal.done]
            watch = RunWatch(clock)
            for output in self.engine.answer(map(self.source.row, missing)):
                journal.add(output.index, self.source.result(output), row_facts(output))
                yield output
            self._finish(journal, watch.counters(self.engine))

    def _finish(self, journal: Journal, run: RunCounters) -> None:
        records = journal.records(len(self.source))
        self.report = Report(
            input=self.source.name,
            output=str(self.output),
            settings=journal.settings,
            resumed=self.resumed,
            run=run,
            **row_statistics(records),
        )
        self._write_errors(journal)
        if self.report.successes:
            journal.merge(lambda file: self._write(file, self._output(journal)))
            with naming_file(self.report_path, RunError, "written"):
                write_whole(self.report_path, self.report.to_json())
        # Last: a job stopped before this still has all its rows and is merged again.
        journal.finish(keep=bool(self.report.successes and self.report.errors))

    def _output(self, journal: Journal) -> OutputTable:
        count = len(self.source)

        def lines() -> Iterator[Line]:
            for record in journal.records(count):
                yield self.source.output_line(record["index"], record["line"])

        return OutputTable(self.source.columns, lines, self.source.arrow())

    def _write_errors(self, journal: Journal) -> None:
        """Writes the rows with errors as rows of JSONL that can be an input; removes the file of an
        earlier try if there are none."""
        with naming_file(self.errors_path, RunError, "written"):
            if not self.report.errors:
                self.errors_path.unlink(missing_ok=True)
                return
            lines = []
            for record in journal.records(len(self.source)):
                if record["facts"]["error_kind"] is not None:
                    index = record["index"]
                    inputs = self.source.inputs(index)
                    failed = {"row": index, **record["line"]}
                    if not inputs:  # it has no cells
                        failed["text"] = self.source.table.text(index)
                    lines.append(encoded({"id": failed["id"], **inputs, FAILED: failed}))
            write_whole(self.errors_path, b"".join(lines))


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


class StreamedJob:
    """Writes a line of JSON for each row, in the order of the rows.

    A line is written as soon as those before it are. Nothing is kept, so that such a job cannot be
    resumed.

    Args:
        output: a binary stream.
    """

    resumed = 0

    def __init__(self, engine: RowEngine, source: Source, output: BinaryIO) -> None:
        self.engine, self.source = engine, source
        self._output = output

    def run(self, clock: CompileClock) -> Generator[BatchOutput, None, None]:
        """Yields outputs as rows finish; `report` is there after the last.

        Raises:
            BrokenPipeError: the reader of the stream is gone.
        """
        watch = RunWatch(clock)
        waiting: dict[int, bytes] = {}
        records = []
        next_index = 0
        for output in self.engine.answer(map(self.source.row, range(len(self.source)))):
            result = self.source.result(output)
            waiting[output.index] = encoded(self.source.output_line(output.index, result))
            records.append({"index": output.index, "facts": row_facts(output), "line": result})
            while next_index in waiting:
                self._output.write(waiting.pop(next_index))
                next_index += 1
            self._output.flush()
            yield output
        self.report = Report(
            input=self.source.name,
            output="stdout",
            settings={},
            resumed=0,
            run=watch.counters(self.engine),
            **row_statistics(records),
        )
