"""Training compared with stored results of torch, transformers, PEFT and TRL.

`training.py --store` chose the combinations and wrote the results.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from paths import DATA
from training_cases import AREAS, Arrays, Combination, thinned
from training_compare import difference, errors
from training_ours import ours

SAMPLE = DATA / "differential"
COMBINATIONS: list[Combination] = json.loads((SAMPLE / "training.json").read_text())["combinations"]


def stored(number: int) -> Arrays:
    """The reference's results for a combination."""
    with np.load(SAMPLE / "training.npz") as file:
        prefix = f"{number}/"
        return {x.removeprefix(prefix): file[x] for x in file.files if x.startswith(prefix)}


def title(combination: Combination) -> str:
    settings: Any = combination.get("settings", combination)
    names = ("model", "name", "schedule", "loss_type")
    return "-".join([combination["area"], *(settings[x] for x in names if x in settings)])


@pytest.mark.in_ci(
    "averages-gpt2_base",
    "dpo-t5_relu-sigmoid",
    "gradients-gpt2_base",
    "gradients-llama_bias",
    "gradients-t5_v11",
    "lora-llama_cls_single",
)
@pytest.mark.parametrize("number", range(len(COMBINATIONS)), ids=map(title, COMBINATIONS))
def test_results_are_those_of_the_reference(number: int):
    combination = COMBINATIONS[number]
    assert difference(combination, thinned(ours(combination)), stored(number)) is None


def test_every_area_has_a_sample():
    assert {combination["area"] for combination in COMBINATIONS} == set(AREAS)


def test_an_error_of_a_hundredth_shows():
    """In any array that is no rounding error, such as the gradient of a key's bias."""
    for number, combination in enumerate(COMBINATIONS):
        expected = stored(number)
        shares = errors(combination, {k: 1.01 * x for k, x in expected.items()}, expected)
        sizes = {name: np.linalg.norm(x) for name, x in expected.items()}
        largest = max(size for name, size in sizes.items() if ":" in name or name == "rates")
        for name, share in shares.items():
            assert share > 1 or sizes[name] < 0.01 * largest, (combination, name)
