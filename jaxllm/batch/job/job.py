"""A job answers the rows of a source into a file of outputs, and can be resumed.

It ends with a `Report`, as JSON and as a table for people.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.job.journal import Journal, errors_file, report_file
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.batch.slot_pool import BatchCounts
from jaxllm.batch.tables.columns import FAILED
from jaxllm.batch.tables.source import Line, OutputTable, Source, encoded, output_writer
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import RunError, naming_file, shortened
from jaxllm.common.files import write_whole

SHOWN_KINDS = 3
"""Kinds of errors that the end of a job explains."""


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
            if isinstance(self.engine, BatchGenerator):
                self.engine.keep_pools(journal.pools, journal.save_pools, self.source.row)
            counters = run_counters(clock)
            for output in self.engine.answer(map(self.source.row, missing)):
                journal.add(output.index, self.source.result(output), row_facts(output))
                yield output
            self._finish(journal, counters(self.engine))

    def _finish(self, journal: Journal, run: RunCounters) -> None:
        source, count = self.source, len(self.source)
        self.report = Report(
            input=source.name,
            output=str(self.output),
            settings=journal.settings,
            resumed=self.resumed,
            sizes_changed=journal.pools.get("sizes_changed", False),
            run=run,
            **row_statistics(journal.records(count)),
        )

        def lines() -> Iterator[Line]:
            records = journal.records(count)
            return (source.output_line(record["index"], record["line"]) for record in records)

        self._write_errors(journal)
        if self.report.successes:
            table = OutputTable(source.columns, lines, source.arrow())
            journal.merge(lambda file: self._write(file, table))
            with naming_file(self.report_path, RunError, "written"):
                write_whole(self.report_path, self.report.to_json())
        # Last: a job stopped before this still has all its rows and is merged again.
        journal.finish(keep=bool(self.report.successes and self.report.errors))

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


def run_counters(clock: CompileClock) -> Callable[[RowEngine], RunCounters]:
    """Begins to measure a run of an engine; the function gives its counters when it has ended."""
    start, seconds, programs, cached = time.monotonic(), clock.seconds, clock.programs, clock.cached
    return lambda engine: RunCounters(
        counts=engine.counts,
        memory=engine.memory,
        seconds=time.monotonic() - start,
        compile_seconds=clock.seconds - seconds,
        programs=clock.programs - programs,
        programs_from_cache=clock.cached - cached,
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
        counters = run_counters(clock)
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
            sizes_changed=False,
            run=counters(self.engine),
            **row_statistics(records),
        )


@dataclasses.dataclass(frozen=True)
class RunCounters:
    """Counters and times of one run of a job, without earlier runs."""

    counts: BatchCounts
    memory: Sequence[Prediction]
    seconds: float
    """Seconds that the run took, compiling included."""
    compile_seconds: float
    programs: int
    programs_from_cache: int

    def per_second(self, count: int) -> float:
        """`count` per second, compilation time excluded."""
        return count / max(self.seconds - self.compile_seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        counts = self.counts
        return {
            **counts.to_dict(),
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "programs": self.programs,
            "programs_from_cache": self.programs_from_cache,
            "rows_per_second": self.per_second(counts.answered),
            "prompt_tokens_per_second": self.per_second(counts.prompt_tokens),
            "new_tokens_per_second": self.per_second(counts.new_tokens),
            "memory": [dataclasses.asdict(prediction) for prediction in self.memory],
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """Report of a finished job."""

    input: str
    output: str
    settings: Mapping[str, Any]
    """The settings with which the job was begun; limits of another try are not among them."""
    rows: int
    sequences: int
    resumed: int
    """Rows that runs before the last one answered."""
    sizes_changed: bool
    """A resumed run chose new sizes, for another `--slots` or `--memory` or since the sizes in the
    journal did not suit the run. The rows may then differ by rounding from the rows of a job that
    never stopped."""
    errors: Mapping[str, int]
    """Errors by class."""
    first_errors: Mapping[str, str]
    """The message of the first error of each class."""
    finish_reasons: Mapping[str, int]
    prompt_lengths: Mapping[str, float]
    new_lengths: Mapping[str, float]
    run: RunCounters

    @property
    def successes(self) -> int:
        """Rows without an error."""
        return self.rows - sum(self.errors.values())

    def to_json(self) -> bytes:
        """Contents of the file beside the output."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["run"] = self.run.to_dict()
        return json.dumps(fields, indent=2).encode()

    def table(self) -> list[tuple[str, str]]:
        """Names and formatted values; scores and vectors have no lines of decoding."""
        run, counts = self.run, self.run.counts
        rows = f"{self.rows:,}" + (f", {self.resumed:,} of them before" if self.resumed else "")
        lines = [
            ("rows", rows),
            ("errors", format_counts(self.errors)),
            ("prompt lengths", format_summary(self.prompt_lengths)),
            ("time", f"{run.seconds:.1f} s, {run.compile_seconds:.1f} s of it compiling"),
            ("programs", f"{run.programs}, {run.programs_from_cache} of them from the cache"),
            (
                "speed",
                f"{run.per_second(counts.answered):.2f} rows/s, "
                f"{run.per_second(counts.prompt_tokens):.1f} prompt"
                + (f" and {run.per_second(counts.new_tokens):.1f} new" if counts.new_tokens else "")
                + " tokens/s",
            ),
        ]
        if self.finish_reasons:
            lines.insert(2, ("finished by", format_counts(self.finish_reasons)))
            lines.insert(4, ("new lengths", format_summary(self.new_lengths)))
        if counts.cut_texts:
            lines.insert(2, ("cut", f"{counts.cut_texts:,} texts, which were too long"))
        if counts.decode_steps:
            slots = f"{counts.utilisation:.1%} busy over {counts.decode_steps:,} steps"
            lines.append(("slots", slots))
        lines += [("memory", line) for line in dict.fromkeys(map(str, run.memory))]
        if self.sizes_changed:
            remark = (
                "chosen anew, for another --slots or --memory, other limits or another version; "
                "rows may differ by rounding"
            )
            lines.append(("sizes", remark))
        if counts.halvings:
            lines.append(("memory", f"ran out {counts.halvings} times; slots were halved"))
        return lines


def explained(errors: Mapping[str, int], first_errors: Mapping[str, str]) -> list[str]:
    """The commonest kinds of errors, each with its first row, one per line."""
    kinds = list(errors.items())
    lines = [
        f"  {count:,} {kind}, the first in {shortened(first_errors[kind], 200)}"
        for kind, count in kinds[:SHOWN_KINDS]
    ]
    rest = sum(count for _, count in kinds[SHOWN_KINDS:])
    return [*lines, f"  {rest:,} of other kinds"] if rest else lines


def row_facts(output: BatchOutput) -> dict[str, Any]:
    """Statistics of one row for the report, as JSON."""
    return {
        "prompt_tokens": output.prompt_tokens,
        "new_lengths": list(output.new_lengths),
        "finish_reasons": list(output.finish_reasons),
        "error_kind": output.error_kind,
    }


def row_statistics(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Computes the fields of a `Report` that follow from the rows: for each its `row_facts`
    ("facts") and its result ("line")."""
    prompt_lengths: list[int] = []
    new_lengths: list[int] = []
    errors: Counter[str] = Counter()
    finish_reasons: Counter[str] = Counter()
    first_errors: dict[str, str] = {}
    count = 0
    for record in records:
        count += 1
        facts = record["facts"]
        if facts["error_kind"] is not None:
            errors[facts["error_kind"]] += 1
            error = record["line"].get("error")
            if isinstance(error, Mapping):  # OpenAI's format
                error = f"{record['line'].get('custom_id')}: {error.get('message')}"
            first_errors.setdefault(facts["error_kind"], str(error))
            continue
        finish_reasons.update(facts["finish_reasons"])
        prompt_lengths.append(facts["prompt_tokens"])
        new_lengths += facts["new_lengths"]
    return {
        "rows": count,
        "sequences": len(new_lengths),
        "errors": dict(errors.most_common()),
        "first_errors": first_errors,
        "finish_reasons": dict(finish_reasons),
        "prompt_lengths": length_summary(prompt_lengths),
        "new_lengths": length_summary(new_lengths),
    }


def length_summary(values: Sequence[int]) -> dict[str, float]:
    """Total, mean and quantiles.

    >>> length_summary([1, 2, 3, 10])["median"], length_summary([1, 2, 3, 10])["total"]
    (2.5, 16.0)
    """
    if not values:
        return {"total": 0.0}
    names = ("min", "median", "p95", "max")
    quantiles = zip(names, np.quantile(values, [0, 0.5, 0.95, 1]), strict=True)
    result = {"total": np.sum(values), "mean": np.mean(values), **dict(quantiles)}
    return {name: float(value) for name, value in result.items()}


def format_summary(values: Mapping[str, float]) -> str:
    """A summary on one line."""
    if "mean" not in values:
        return "none"
    return (
        f"{values['min']:.0f} to {values['max']:.0f}, mean {values['mean']:.1f}, median "
        f"{values['median']:.0f}, 95% up to {values['p95']:.0f}; {values['total']:,.0f} in all"
    )


def format_counts(counts: Mapping[str, int]) -> str:
    """Counts on one line.

    >>> format_counts({"eos": 3, "length": 1}), format_counts({})
    ('3 eos, 1 length', 'none')
    """
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"
