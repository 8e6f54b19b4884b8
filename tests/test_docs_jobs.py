"""The code of the pages on batches, servers, devices and clusters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import run_python, run_shell, shell_blocks
from paths import ROOT

DOCS = ROOT / "docs"


@pytest.mark.ci
def test_the_batch_page_runs(smollm2_gguf: Path, tmp_path: Path) -> None:
    (command,) = shell_blocks(DOCS / "batch.md")
    run_shell(command, tmp_path)
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == ["a", "b"]
    assert "Paris" in rows[0]["text"]
    assert set(rows[0]) == {"id", "text", "output_ids", "finish_reason"}
    _, printed = run_python(DOCS / "batch.md")
    assert len(printed.splitlines()) >= 2
