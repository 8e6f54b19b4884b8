"""The code of the pages on batches, servers, devices and clusters."""

from __future__ import annotations

import csv
import socket
import time
from pathlib import Path

import httpx
import pytest
from pages import run_python, run_shell, shell_blocks, start_shell
from paths import ROOT

DOCS = ROOT / "docs"
NOT_RUN = {
    "devices.md": "an 8B model from the network, eight devices, several hosts",
    "scaling.md": "clusters",
}
"""Pages whose shell blocks no test runs, and what they need; the Python of scaling.md needs Ray and
an object store."""


@pytest.mark.ci
def test_the_batch_page_runs(smollm2_gguf: Path, tmp_path: Path) -> None:
    (command,) = shell_blocks(DOCS / "batch.md")
    run_shell(command, tmp_path)
    with (tmp_path / "answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ["id", "row", "question", "lang", "text", "output_ids", "finish_reason"]
    assert list(rows[0]) == [*columns, "error", "error_kind"]
    assert [row["id"] for row in rows] == ["a", "b"]
    assert "Paris" in rows[0]["text"]
    _, printed = run_python(DOCS / "batch.md")
    assert len(printed.splitlines()) >= 2


@pytest.mark.ci
def test_the_serving_page_runs(smollm2_gguf: Path, tmp_path: Path) -> None:
    """With a free port in place of the page's, and few slots, which compile sooner."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    page = tmp_path / "serving.md"
    text = (DOCS / "serving.md").read_text(encoding="utf-8")
    page.write_text(text.replace("8000", port), encoding="utf-8")
    (block,) = shell_blocks(page)
    install, command = block.splitlines()
    assert install.startswith("pip install")
    server = start_shell(f"exec {command} --slots 2 --context 128 --max-new-tokens 8", tmp_path)
    try:
        deadline = time.monotonic() + 600
        while server.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        else:
            pytest.fail("the server does not answer")
        _, printed = run_python(page)
        assert len(printed.splitlines()) >= 3
    finally:
        server.terminate()
        server.communicate(timeout=90)


@pytest.mark.ci
def test_the_python_of_the_devices_page_runs(smollm2_gguf: Path) -> None:
    _, printed = run_python(DOCS / "devices.md")
    assert "Paris" in printed


@pytest.mark.parametrize("page", sorted(NOT_RUN))
def test_exceptions_are_needed(page: str) -> None:
    assert shell_blocks(DOCS / page)
