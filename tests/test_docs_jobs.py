"""The code of the pages on batches, servers, devices and clusters."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import re
import socket
import time
import typing
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pages import run_python, run_shell, shell_blocks, start_shell
from paths import ROOT
from translation_tools import write_model

from jaxllm.cli.main import main
from jaxllm.planning import decide
from jaxllm.training.run.recipe import Recipe, read_recipe

DOCS = ROOT / "docs"
NOT_RUN = {
    "devices.md": "several hosts",
    "llama-8b.md": "an 8B model from the network, eight devices",
    "t5-xxl.md": "an 11B model from the network, four devices",
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
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
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


LARGE = ("llama-8b.md", "t5-xxl.md")


@pytest.mark.parametrize("page", LARGE)
def test_commands_for_large_models_have_these_options(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n".join(shell_blocks(DOCS / page)).replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith("jaxllm ")]
    assert len(commands) >= 5
    for line in commands:
        name = line.split()[1]
        with contextlib.suppress(SystemExit):
            main([name, "--help"])
        known = capsys.readouterr().out
        recipe = {field for field, _ in recipe_fields(Recipe)} if name == "train" else set()
        for option in re.findall(r"--([a-z][a-z.-]*)", line):
            assert f"--{option}" in known or option.replace("-", "_") in recipe, (option, line)


def recipe_fields(kind: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Paths of the fields of a recipe, such as ``model.path``."""
    for name, hint in typing.get_type_hints(kind).items():
        yield f"{prefix}{name}", hint
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner):
                yield from recipe_fields(inner, f"{prefix}{name}.")


def test_the_recipe_for_t5_xxl_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "t5-xxl.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "t5.yaml").write_text(block, encoding="utf-8")
    recipe = read_recipe(tmp_path / "t5.yaml")
    assert (recipe.model.remat, recipe.mesh.fsdp) == ("full", 4)


@pytest.mark.parametrize(
    ("page", "shape", "topology", "prompt"),
    [("llama-8b.md", "llama8b", "v5e:2x4", 896), ("t5-xxl.md", "t5xxl", "v6e:2x2", 512)],
)
def test_the_meshes_of_large_models(page: str, shape: str, topology: str, prompt: int) -> None:
    """The figures on the page are those of `decide`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    config = ROOT / "benchmarks" / "shapes" / f"{shape}.json"
    for bounds in decide(config, topology, prompt=prompt, new=128).meshes:
        mesh = ",".join(f"{axis}={size}" for axis, size in bounds.mesh.items() if size > 1)
        (row,) = re.findall(rf"^\|.* `{mesh}` \|.* {bounds.rows} \|.*$", text, re.M) or [None]
        assert (row is None) == (bounds.rows == 0 or mesh == "data=4"), mesh
        if row is not None:
            assert f"| {bounds.requests_per_s:.1f} |" in row


@pytest.mark.ci
def test_the_translation_page_runs(tmp_path: Path) -> None:
    """With tiny models of these families in place of the Hub's, and their languages."""
    write_model(tmp_path / "nllb", "nllb")
    write_model(tmp_path / "marian", "marian")
    page, text = tmp_path / "translation.md", (DOCS / "translation.md").read_text(encoding="utf-8")
    names = {
        "facebook/nllb-200-distilled-600M": "nllb",
        "Helsinki-NLP/opus-mt-en-ROMANCE": "marian",
    }
    names |= {"fra<<": "deu<<", "max_new_tokens=256": "max_new_tokens=8"}
    for name, tiny_name in (names | {"--max-new-tokens 256": "--max-new-tokens 8"}).items():
        text = text.replace(name, tiny_name)
    page.write_text(text, encoding="utf-8")
    lines = ["Hello world.", "", "  ", "Nice to meet you. " * 40]
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for block in shell_blocks(page):
        run_shell(block, tmp_path)
    with contextlib.chdir(tmp_path):
        names, printed = run_python(page)
    written = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert written == [" ".join(text.split()) for text in names["texts"]] + [""]
    assert "translation_text" in printed
    for name in ("answers", "french"):
        rows = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert [bool(json.loads(row)["output_ids"]) for row in rows] == [True, False, False, True]
