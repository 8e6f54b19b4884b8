"""A job whose output goes into a stream, such as stdout, row by row."""

from __future__ import annotations

from collections.abc import Generator
from typing import BinaryIO

from jaxllm.batch.job.job import RowEngine, RunWatch
from jaxllm.batch.job.report import Report, row_facts, row_statistics
from jaxllm.batch.rows import BatchOutput
from jaxllm.batch.tables.outputs import encoded
from jaxllm.batch.tables.source import Source
from jaxllm.common.compiling import CompileClock


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
