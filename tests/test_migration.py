"""docs/migration.md: its scripts run as they stand, on small models, and its names exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from pages import run_python
from paths import DATA, ROOT

import jaxllm

PAGE = ROOT / "docs" / "migration.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.ci
def test_scripts_run(tmp_path: Path) -> None:
    folders = {name: DATA / "reference" / f"tiny-{name.lower()}" for name in ("GPT2", "T5")}
    namespace, _ = run_python(PAGE, **folders, OUTPUT=tmp_path / "saved")
    steps, losses = namespace["steps"], namespace["losses"]
    for run in (losses[:steps], losses[steps:]):
        assert len(run) == steps
        assert np.mean(run[-3:]) < 0.8 * run[0]
    saved, tokenizer = jaxllm.load(tmp_path / "saved")
    assert tokenizer is not None
    inputs = {"input_ids": namespace["inputs"]["input_ids"], "num_beams": 2, "max_new_tokens": 8}
    mask = namespace["inputs"]["attention_mask"]
    again = jaxllm.generate(saved, attention_mask=mask, **inputs)
    np.testing.assert_array_equal(again.sequences, namespace["beams"].sequences)
    before, _ = jaxllm.load(namespace["T5"])
    untrained = jaxllm.generate(before, attention_mask=mask, **inputs)
    assert not np.array_equal(untrained.sequences, again.sequences)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"jaxllm\.((?:models\.)?\w+)", TEXT))))
def test_names_exist(name: str) -> None:
    package, _, member = name.rpartition(".")
    assert hasattr(jaxllm.models if package else jaxllm, member)
