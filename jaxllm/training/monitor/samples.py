"""Answers before and after training: kept in the run's folder, side by side in its report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from jaxllm.common.errors import RunError
from jaxllm.training.evaluation.evaluate import Sample
from jaxllm.training.monitor.report import ReportSample
from jaxllm.training.output_files import write_text

BEFORE, AFTER = "samples_before.json", "samples_after.json"


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Keeps answers for a report that is written later, perhaps by another process."""
    write_text(path, json.dumps([dataclasses.asdict(sample) for sample in samples], indent=1))


def read_samples(path: Path) -> list[Sample]:
    """What `write_samples` wrote; none where nothing was.

    Raises:
        RunError: the file is broken.
    """
    if not path.exists():
        return []
    try:
        return [Sample(**sample) for sample in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: cannot be read ({error}); move it away") from None


def paired(before: Sequence[Sample], after: Sequence[Sample]) -> list[ReportSample]:
    """Answers of one prompt side by side."""
    earlier = {sample.prompt: sample.prediction for sample in before}
    return [
        ReportSample(
            prompt=sample.prompt,
            after=sample.prediction,
            before=earlier.get(sample.prompt),
            reference=sample.reference,
        )
        for sample in after
    ]
