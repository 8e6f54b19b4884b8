"""Report of a finished job: as JSON, and as a table for people.

Apart from job.py, which only fills it in.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput
from jaxllm.common.errors import shortened

SHOWN_KINDS = 3
"""Kinds of errors that the end of a job explains."""


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
