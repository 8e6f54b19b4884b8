"""Group and constrained beams against transformers 4.56 on random settings (tests/data/beams)."""

from __future__ import annotations

import json

import paths
import pytest
from conformance_runs import problems, run

DATA = paths.DATA / "beams"
CASES = json.loads((DATA / "cases.json").read_text())["cases"]


# Each case has a program of its own to compile; two stand for the rest.
FAST = ("group-s_t5_gated-1", "constrained-s_gpt2-1")
PARAMETERS = [
    pytest.param(case, id=case["id"], marks=[] if case["id"] in FAST else [pytest.mark.slow])
    for case in CASES
]


@pytest.mark.ci
@pytest.mark.parametrize("case", PARAMETERS)
def test_same_texts_and_scores(case):
    assert problems(case, run(case)) == []
