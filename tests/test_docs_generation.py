"""The code of the pages on generation, models and commands runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import run_python
from paths import DOCS

from jaxllm.models.registry import FAMILIES


@pytest.mark.ci
def test_the_generation_page_runs(smollm2_gguf: Path) -> None:
    pytest.importorskip("llguidance")
    names, printed = run_python(DOCS / "generation.md")
    assert printed.startswith("The sea was")
    assert names["out"].sequences.shape[1] <= names["ids"].shape[1] + 8


@pytest.mark.ci
def test_the_models_page_runs(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(DOCS / "models.md")
    assert (tmp_path / "folder" / "model.safetensors").exists()


def test_the_models_page_names_every_family() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []
