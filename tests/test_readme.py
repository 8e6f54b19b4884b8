"""The README's Python runs as it stands, in order, in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import run_python
from paths import ROOT

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.ci
def test_python_blocks_run(smollm2_gguf: Path) -> None:
    _, printed = run_python(README)
    answer, streamed, samples, *_ = printed.splitlines()
    assert answer == streamed == "The capital of France is Paris."
    assert samples == "4"
    assert "[[-inf   6.   4.]]" in printed


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (README.parent / link).exists()
