"""Changed config.json, generation_config.json, adapter_config.json, recipes and rows of a batch:
each is read or raises a JaxLLMError, in time and little memory."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from fuzz_seeds import seeds
from fuzzing import fuzz_count, mutate, mutate_json, run_batch

TARGETS = ("config", "generation_config", "adapter_config", "recipe", "rows")


def check(count: int, folder: Path) -> None:
    rng, files = random.Random(count), []
    for name in TARGETS:
        originals = seeds(name, folder)
        for number in range(count):
            change = mutate_json if rng.random() < 0.8 else mutate
            files.append(folder / f"{number}.{name}")
            files[-1].write_bytes(change(rng.choice(originals), rng))
    outcomes = run_batch("fuzz_targets:by_suffix", files)
    bad = [o for o in outcomes if not o.harmless or o.grown_mib > 512 or len(o.detail) > 600]
    assert not bad, "\n".join(map(str, bad[:5]))
    for status in ("ok", "refused"):
        counts = Counter(outcome.path.suffix for outcome in outcomes if outcome.status == status)
        assert counts.keys() == {f".{name}" for name in TARGETS}
        assert min(counts.values()) > count / 20, (status, counts)


@pytest.mark.ci
def test_some_settings(tmp_path: Path) -> None:
    check(fuzz_count(300), tmp_path)


@pytest.mark.slow
def test_many_settings(tmp_path: Path) -> None:
    check(fuzz_count(2000), tmp_path)
