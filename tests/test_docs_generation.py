"""The code of the pages on generation, models and commands runs as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import run_python, run_shell, shell_blocks
from paths import DOCS

from jaxllm.cli.main import COMMANDS
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


@pytest.mark.ci
def test_the_commands_run(smollm2_gguf: Path, tmp_path: Path) -> None:
    (commands,) = shell_blocks(DOCS / "cli.md")
    assert run_shell(commands, tmp_path).startswith("The capital of France is Paris.")


def test_the_page_of_commands_names_every_command() -> None:
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"`jaxllm {name}`" not in text] == []
