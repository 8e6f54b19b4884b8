"""A stored sample of the randomised comparison of generation: jaxllm gives transformers' results.

`python tests/differential/generation.py --store` renews it; see README.md.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from generation_cases import ABSOLUTE, RELATIVE, Combination, run, summary
from paths import DATA

STORED = json.loads((DATA / "differential" / "generation.json").read_text())["cases"]


@pytest.mark.by_default("contrastive-13-t5", "contrastive-3-t5")
@pytest.mark.parametrize("case", STORED, ids=lambda case: case["id"])
def test_generation_equals_the_reference(case: dict[str, Any]):
    combination = Combination(**case["combination"])

    actual = summary(combination, run(combination))

    assert case["expected"].keys() <= actual.keys()
    assert actual["tokens"] == case["expected"]["tokens"]
    for name, expected in case["expected"].items():
        assert_close(expected, actual[name], name)


def assert_close(expected: Any, actual: Any, place: str) -> None:
    """Nested lists agree: equal lengths, and equal numbers up to float32 rounding."""
    if isinstance(expected, list):
        assert len(expected) == len(actual), place
        for i, pair in enumerate(zip(expected, actual, strict=True)):
            assert_close(*pair, f"{place}[{i}]")
    else:
        np.testing.assert_allclose(actual, expected, RELATIVE, ABSOLUTE, err_msg=place)
