"""A full disk at each stage of training, export and a batch: one line, and what was there is
whole."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import harness_runs
import pytest
from paths import ROOT
from tiny_runs import measured, saved, write_recipe

import jaxllm
from jaxllm.cli import eval as eval_command
from jaxllm.cli import export, generate, train
from jaxllm.common.errors import JaxLLMError

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
STEPS = 6
SIZES = (4, 16, 40, 90, 160, 250, 350, 450)
"""Kilobytes that end with the log, the run card, the first checkpoint, ..., the report."""


class Disk:
    """A small file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def mount(self, kilobytes: int, *flags: str) -> None:
        options = ",".join((f"size={kilobytes}k", *flags))
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")

    def unmount(self) -> None:
        # Lazily, since a library may have a file of it mapped.
        subprocess.run(["umount", "-l", str(self.folder)], capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path / "disk")
    yield disk
    disk.unmount()


def small(folder: Path) -> Path:
    data = {"path": str(folder / "rows.jsonl"), "format": "text", "max_length": 32, "bucket": None}
    settings = {"checkpoints": {"every": 2, "keep": 9}, "evaluation": {"every": 3}}
    return write_recipe(folder, data=data, eval_data=dict(data), max_steps=STEPS, **settings)


def run(main: Any, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    code = main([*map(str, arguments)], "x")
    return code, capsys.readouterr().err.splitlines()


@pytest.mark.slow
def test_training(tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, straight = small(tmp_path), tmp_path / "straight"
    flags = ("--quiet", "--no-compile-cache", "--output-dir")
    assert run(train.main, capsys, recipe, *flags, straight) == (0, [])
    failures = []
    for size in SIZES:
        disk.mount(size)
        folder = disk.folder / "run"
        code, lines = run(train.main, capsys, recipe, *flags, folder)
        if code:
            assert (code, len(lines)) == (2, 1), lines
            assert "No space left on device" in lines[0]
            failures.append(lines[0].split(str(folder))[1][:12])
            disk.mount(16_000, "remount")
            assert run(train.main, capsys, recipe, *flags, folder, "--resume") == (0, [])
        assert saved(folder) == saved(straight)
        assert measured(folder) == measured(straight)
        assert {p.name for p in folder.iterdir()} == {p.name for p in straight.iterdir()}
        disk.unmount()
    assert len(set(failures)) > 2


@pytest.mark.ci
def test_export(tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "run", disk.folder / "out"
    recipe = small(tmp_path)
    flags = ("--max-steps", 2, "--eval-data", "null", "--quiet", "--no-compile-cache")
    assert run(train.main, capsys, recipe, "--output-dir", folder, *flags) == (0, [])
    for size in (4, 44, 48, 52):  # the weights take 44 KB
        disk.mount(size)
        code, lines = run(export.main, capsys, folder, out)
        assert (code, len(lines)) == (2, 1), lines
        assert "No space left on device" in lines[0]
        assert list(disk.folder.iterdir()) == []
        disk.unmount()
    disk.mount(100)
    assert run(export.main, capsys, folder, out) == (0, [])
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors"}


@pytest.mark.slow
def test_batch(tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Hello {i}", "max_new_tokens": 1 + i % 8} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--model", MODEL, "--input", tmp_path / "rows.jsonl", "--slots", 4, "--quiet")
    flags += ("--no-compile-cache", "--do-sample", "--seed", 3, "--output")
    straight, out = tmp_path / "straight.jsonl", disk.folder / "out.jsonl"
    assert run(generate.main, capsys, *flags, straight) == (0, [])
    failures, sizes = set(), range(4, 60, 4)  # each file takes a page of 4 KB at least
    for size in sizes:
        disk.mount(size)
        code, lines = run(generate.main, capsys, *flags, out)
        if code:
            assert (code, len(lines)) == (2, 1), lines
            assert "No space left on device" in lines[0]
            failures.add(lines[0].split(f"{disk.folder}/")[1].split(":")[0])
            disk.mount(1000, "remount")
            assert run(generate.main, capsys, *flags, out, "--resume") == (0, [])
        assert out.read_bytes() == straight.read_bytes()
        names = {"out.jsonl", "out.jsonl.report.json"}
        assert {path.name for path in disk.folder.iterdir()} == names
        disk.unmount()
    assert code == 0  # with the last size
    assert len(failures) > 2, failures


def test_save(tmp_path: Path, disk: Disk) -> None:
    model, tokenizer = jaxllm.load(MODEL)
    disk.mount(1000)
    jaxllm.save_hf(disk.folder / "model", model, tokenizer)
    files = {path.name: path.read_bytes() for path in (disk.folder / "model").iterdir()}
    disk.unmount()
    for size in (4, 100, 244, 260):
        disk.mount(size)
        with pytest.raises(JaxLLMError, match="No space left on device"):
            jaxllm.save_hf(disk.folder / "model", model, tokenizer)
        written = {path.name: path.read_bytes() for path in (disk.folder / "model").iterdir()}
        assert written.items() <= files.items()  # each file is whole, or is not there
        disk.mount(1000, "remount")
        jaxllm.save_hf(disk.folder / "model", model, tokenizer, overwrite=True)
        assert {p.name: p.read_bytes() for p in (disk.folder / "model").iterdir()} == files
        disk.unmount()


COMMANDS = {
    "chat": ("--max-new-tokens", 4),
    "eval": ("--perplexity", ROOT / "LICENSE", "--context", 64),
    "plan": ("--topology", "cpu", "--prompt", 16, "--batch", 1, "--program", "prefill"),
}
CLOSED = "nothing more can be written (No space left on device)"


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_that_print(name: str, tmp_path: Path, disk: Disk) -> None:
    model, tokenizer = jaxllm.load(MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    jaxllm.save_hf(tmp_path / "model", model, tokenizer)

    def finish(*flags: object, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "jaxllm",
            name,
            tmp_path / "model",
            *COMMANDS[name],
            *flags,
        ]
        words = [str(word) for word in command]
        return subprocess.run(
            words, cwd=ROOT, input="Hello\n", text=True, stdout=stdout, stderr=subprocess.PIPE
        )

    straight = finish()
    assert straight.returncode == 0, straight.stderr
    with Path("/dev/full").open("w") as full:
        failed = finish(stdout=full)
    errors = [line for line in failed.stderr.splitlines() if "rror" in line]
    assert (failed.returncode, errors) == (2, [f"jaxllm {name}: error: {CLOSED}"])
    if name != "plan":  # programs that cannot be kept are a warning
        disk.mount(4)
        done = finish("--compile-cache", disk.folder / "programs")
        assert (done.returncode, done.stdout) == (0, straight.stdout)
        assert "No space left on device" in done.stderr


@pytest.mark.ci
def test_eval_tasks(tmp_path: Path, disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    """The tasks' own copy of their data, then the results, which are printed all the same."""
    harness_runs.write_model("llama", tmp_path / "model")
    out = disk.folder / "results.json"
    flags = (tmp_path / "model", "--tasks", "local_choice", "--include-path", ".", "--limit", 2)
    flags += ("--quiet", "--no-compile-cache", "--output", out)
    for cache in (disk.folder, tmp_path):
        disk.mount(4)
        (disk.folder / "full").write_bytes(bytes(4096))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(harness_runs.FOLDER)
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache / "datasets"))
            code = eval_command.main([*map(str, flags)], "x")
            printed, errors = capsys.readouterr()
            assert (code, errors.count("\n")) == (2, 1), errors
            assert re.search("No space left on device|Not enough disk space", errors), errors
            assert not out.exists()
            assert ("local_choice" in printed) == (cache == tmp_path)
            disk.mount(1000, "remount")
            assert eval_command.main([*map(str, flags)], "x") == 0
        assert len(json.loads(out.read_bytes())["samples"]["local_choice"]) == 2
        disk.unmount()


@pytest.mark.slow
def test_serve(disk: Disk) -> None:
    disk.mount(4)
    flags = ("--port", 0, "--context", 64, "--compile-cache", disk.folder / "programs")
    command = [str(word) for word in (sys.executable, "-m", "jaxllm", "serve", MODEL, *flags)]
    body = json.dumps({"model": MODEL.name, "prompt": "Hello", "max_tokens": 3}).encode()
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = (re.search(r"serving \S+ on (http://\S+)", line) for line in process.stderr)
        address = next(match for match in found if match)
        url = f"{address[1]}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
