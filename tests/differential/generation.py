"""Compares generation with transformers 4.55.4 in random combinations of settings.

4.55 is the last version with contrastive search, DoLa and constrained beams in its core. Areas:
drafts (assistants, early exit, prompt lookup), constraints, DoLa, contrastive search, sampled
beams, hidden states and attentions, and transition scores.

    python tests/differential/generation.py --count 120 --out differences.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from typing import Any

# Before jax starts: on a machine with a GPU float32 is compared on the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAXLLM_CPU_KERNELS", "0")

import generation_draws
import generation_reference as reference
import numpy as np
from compiling import FAST
from generation_cases import (
    Combination,
    Difference,
    Outcome,
    compare,
    run,
    summary,
)
from generation_models import TESTS
from report import Report, arguments, versions

from jaxllm.common.errors import NonFiniteError

DOCUMENTED = {
    "near tie": (
        "the reference gives jaxllm's result if its weights or the thresholds of filters change by "
        "rounding errors; in greedy search the best two scores differ by less than 1e-4"
    ),
    "encoder_repetition_penalty with beams": (
        "transformers applies the prompt of row i to row i of all beams; without this fault its "
        "result is jaxllm's"
    ),
    "forbidden candidate": (
        "contrastive search of transformers may take a token of score minus infinity if fewer than "
        "top_k tokens are allowed"
    ),
    "too few candidates": (
        "torch cannot draw more candidates of sampled beams than have a probability; jaxllm goes "
        "on with those that there are"
    ),
    "shared progress of a disjunction": (
        "transformers copies a disjunction in progress without its list of tokens, so that two "
        "words of it share their progress; without this fault its result is jaxllm's"
    ),
    "decay of a forbidden end token": (
        "4.55 makes NaN of an end token of score -inf (5.x does not); without this fault its "
        "result is jaxllm's"
    ),
    "every token forbidden": "jaxllm raises NonFiniteError; transformers takes token 0",
}


NEAR_TIE = 1e-4
"""Two tokens whose scores differ by less may change places by rounding."""
STORED: dict[str, tuple[int, ...]] = {
    "drafts": (11, 26, 15, 20),
    "constraints": (0, 16, 32),
    "dola": (5, 9, 17),
    "contrastive": (3, 13, 23),
    "sampled_beams": (1, 13, 25),
    "records": (6, 16, 3),
    "transition_scores": (7, 16, 25),
}
"""Combinations of the stored sample: of one or two programs in each area, since tests compile."""
SAMPLE = TESTS / "data" / "differential" / "generation.json"


def main() -> int:
    os.environ.setdefault("XLA_FLAGS", FAST)  # before jax compiles: programs are many and small
    given = arguments(__doc__ or "", list(generation_draws.AREAS))
    report = Report(DOCUMENTED)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # reports what ran until then
        for area in given.area:
            began = time.monotonic()
            for number in range(100 if given.count is None else given.count):
                combination = generation_draws.draw(area, number, given.seed, reference.likely)
                check(report, number, combination)
            print(f"{area}: {time.monotonic() - began:.0f} s", flush=True)
    if given.store:
        store(given.seed)
    return report.finish(given.out)


def store(seed: int) -> None:
    """Writes the sample that the default tests run."""
    cases: list[dict[str, Any]] = []
    for area, numbers in STORED.items():
        for number in numbers:
            combination = generation_draws.draw(area, number, seed, reference.likely)
            expected = reference.run(combination)
            if compare(combination, expected, run(combination)) is not None:
                print(f"{area} {number} differs, and is not stored")
                continue
            cases.append(
                {
                    "id": f"{area}-{number}-{combination.model}",
                    "combination": dataclasses.asdict(combination),
                    "expected": summary(combination, expected),
                }
            )
    SAMPLE.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in cases)
    SAMPLE.write_text(f'{{"versions": {json.dumps(versions())}, "cases": [\n{lines}\n]}}\n')


def check(report: Report, number: int, combination: Combination) -> None:
    try:
        expected = reference.run(combination)
    except ValueError as error:  # torch refuses the NaN that a fault of a processor has made
        name = cure_that_gives(combination, run(combination))
        if name is None:
            report.differs(combination.area, number, f"transformers raises {error}")
        else:
            report.explained(combination.area, name)
        return
    if expected.failed is not None:
        report.explained(combination.area, expected.failed)
        return
    try:
        actual = run(combination)
    except NonFiniteError:
        actual = None
    difference = compare(combination, expected, actual)
    if difference is None:
        report.equal(combination.area)
    elif name := explanation(combination, actual, difference):
        report.explained(combination.area, name)
        print(f"{combination.area} {number} {combination.model}: {name}: {difference.text}")
    else:
        text = f"{difference.text} (margin {difference.margin:.2g})"
        report.differs(combination.area, f"{number} {combination.model}", text)


def cure_that_gives(combination: Combination, actual: Outcome) -> str | None:
    """Name of the fault of transformers without which it gives jaxllm's result, or None."""
    for name, cure in reference.CURES.items():
        with cure(), contextlib.suppress(ValueError):
            if compare(combination, reference.run(combination), actual) is None:
                return name
    return None


def explanation(
    combination: Combination, actual: Outcome | None, difference: Difference
) -> str | None:
    """Name of the documented difference, or None."""
    for name, cure in reference.CURES.items():
        with cure():
            cured = reference.run(combination)
        if actual is not None and compare(combination, cured, actual) is None:
            return name
        if actual is None and has_forbidden_step(cured):
            return "every token forbidden"
    if actual is None:
        return None
    if difference.takes_forbidden and "penalty_alpha" in combination.fields:
        return "forbidden candidate"
    is_greedy = combination.num_beams == 1 and not combination.fields.get("do_sample")
    if is_greedy and combination.area != "contrastive search":
        return "near tie" if difference.margin < NEAR_TIE else None
    outcomes = reference.nudged(combination)
    is_tied = any(compare(combination, other, actual) is None for other in outcomes)
    return "near tie" if is_tied else None


def has_forbidden_step(expected: Outcome) -> bool:
    """Whether some step has a row without an allowed token."""
    if isinstance(expected.scores, list):
        return any(np.isneginf(row).all(axis=-1).any() for row in expected.scores)
    return expected.scores is not None and bool(np.isneginf(expected.scores).all(axis=-1).any())


if __name__ == "__main__":
    sys.exit(main())
