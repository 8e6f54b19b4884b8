"""The code of the pages on generation, models and commands runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import run_python
from paths import DOCS


@pytest.mark.ci
def test_the_generation_page_runs(smollm2_gguf: Path) -> None:
    pytest.importorskip("llguidance")
    names, printed = run_python(DOCS / "generation.md")
    assert printed.startswith("The sea was")
    assert names["out"].sequences.shape[1] <= names["ids"].shape[1] + 8
