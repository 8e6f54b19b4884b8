"""The code of quantization.md, tokenizers.md, checkpoints.md and evaluation.md runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import harness_runs
import pytest
from pages import run_python, run_shell, shell_blocks
from paths import DOCS

NEEDS_NETWORK = ("pip install", "arc_easy")
"""Blocks that install a package, or load tasks from the Hub."""


@pytest.mark.ci
@pytest.mark.usefixtures("smollm2_gguf")
@pytest.mark.parametrize("page", ["quantization", "tokenizers", "checkpoints"])
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace, printed = run_python(DOCS / f"{page}.md")
    if page == "quantization":
        assert "Paris" in printed
    elif page == "tokenizers":
        assert printed == "['Hello', 'Nice to meet you.']\n"
        assert namespace["model"].config.vocab_size == len(namespace["tokenizer"])
    else:
        assert printed.splitlines()[-1] == "100 {'position': 800}"
        assert namespace["tokenizer"] is not None


@pytest.mark.ci
@pytest.mark.usefixtures("smollm2_gguf")
def test_quantized_generation_runs(tmp_path: Path) -> None:
    (block,) = shell_blocks(DOCS / "quantization.md")
    assert "Paris" in run_shell(block, tmp_path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that evaluation.md names, in the working directory."""
    import datasets

    text = (DOCS / "evaluation.md").read_text(encoding="utf-8")
    (task,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_choice.yaml").write_text(task)
    row = {"question": "Water is", "choices": ["wet", "dry"], "answer": 0}
    (tmp_path / "choice.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    (tmp_path / "book.txt").write_text("The river rose by two metres in the night. " * 20)
    (tmp_path / "path" / "to").mkdir(parents=True)
    harness_runs.write_model("llama", tmp_path / "path" / "to" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path


@pytest.mark.ci
def test_evaluation_runs(folder: Path) -> None:
    blocks = shell_blocks(DOCS / "evaluation.md")
    local = [block for block in blocks if not any(word in block for word in NEEDS_NETWORK)]
    assert len(local) == len(blocks) - 1
    perplexity, *tasks = [run_shell(block, folder) for block in local]
    assert json.loads(perplexity).keys() == {
        "perplexity",
        "bits_per_byte",
        "log_likelihood",
        "tokens",
    }
    _, table = run_python(DOCS / "evaluation.md")
    for printed in (*tasks, table):
        assert "my_choice" in printed
