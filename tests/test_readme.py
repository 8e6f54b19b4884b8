"""The README's code runs as it stands."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import time
from pathlib import Path

import httpx
import pytest
from pages import run_python, run_shell, shell_blocks, start_shell
from paths import ROOT

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
MAX_WORDS = 900
MAKE, BATCH, TRAIN, SERVE, ASK = shell_blocks(README)


def test_the_readme_is_short():
    assert len(TEXT.split()) <= MAX_WORDS


@pytest.mark.ci
def test_python_blocks_run(smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    _, printed = run_python(README)
    assert printed.splitlines()[0] == "['The capital of France is Paris.']"
    assert (tmp_path / "my-model" / "model.safetensors").exists()
    assert (tmp_path / "my-checkpoint").is_dir()


@pytest.mark.ci
def test_the_batch_runs(smollm2_gguf: Path, tmp_path: Path):
    run_shell(BATCH, tmp_path)
    with (tmp_path / "answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["city"], row["country"]) for row in rows] == [
        ("Paris", "France"),
        ("Rome", "Italy"),
    ]
    assert all(row["text"] and not row["error"] for row in rows)


@pytest.mark.slow
def test_the_fine_tuning_runs(smollm2_gguf: Path, tmp_path: Path):
    run_shell(TRAIN, tmp_path)
    assert (tmp_path / "chat-lora" / "adapter_model.safetensors").exists()


@pytest.mark.ci
def test_the_server_answers(smollm2_gguf: Path, tmp_path: Path):
    """On the README's port, or the test is skipped if another program has it."""
    port = re.search(r"--port (\d+)", SERVE)
    assert port is not None
    server = start_shell(f"exec {SERVE}", tmp_path)
    try:
        deadline = time.monotonic() + 600
        while True:
            if server.poll() is not None:
                _, err = server.communicate()
                if "in use" in err:
                    pytest.skip(err)
                pytest.fail(err)
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://localhost:{port[1]}/health").is_success:
                    break
            time.sleep(0.5)
        answer = json.loads(run_shell(ASK, tmp_path))
        assert answer["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_make_has_the_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", MAKE, re.MULTILINE):
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (README.parent / link).exists()
