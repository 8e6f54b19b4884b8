"""What a person can get wrong: one line, exit code 2 and no traceback, from every command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from jaxllm.cli.main import main

MODEL = str(ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok")
ROWS = ("generate", "--quiet", "--model", MODEL, "--output", "o.jsonl", "--input")
CASES = {
    "model: a link to itself": (("generate", "--model", "loop", "a"), "no such file"),
    "model: a text": (("chat", "text"), "not a weight file"),
    "model: a folder without a config": (("serve", "folder"), "config.json: no such file"),
    "model: a name with a newline": (("generate", "--model", "a\nb", "x"), r"'a\nb'"),
    "model: folder as config": (("generate", "--model", "model", "a"), "config.json"),
    "rows: a folder without data": ((*ROWS, "datasets:"), "names no data set"),
    "rows: a link to itself": ((*ROWS, "loop"), "loop: cannot be read"),
    "rows: cannot be read": ((*ROWS, "/proc/self/mem"), "cannot be read (Input/output error)"),
    "rows: binary": ((*ROWS, "binary"), "found binary data"),
    "rows: none": ((*ROWS, "/dev/null"), "has no rows"),
    "rows: a long name": ((*ROWS, "x" * 300), "ile name too long"),
    "rows: of an unknown user": ((*ROWS, "~no_such_user/rows.jsonl"), "~no_such_user/rows.jsonl"),
    "run: a long name": (("export", "x" * 300, "out"), "ile name too long"),
    "grammar: cannot be read": ((*ROWS, "rows.jsonl", "--grammar", "folder"), "folder: cannot"),
    "grammar: a long text": ((*ROWS, "rows.jsonl", "--grammar", "start: " + "x" * 5000), "lark"),
    "schema: a binary file": ((*ROWS, "rows.jsonl", "--schema", "binary"), "not UTF-8 (byte"),
    "text: missing": (("eval", MODEL, "--perplexity", "nowhere"), "No such file or directory"),
    "text: a folder": (("eval", MODEL, "--perplexity", "folder"), "Is a directory"),
    "text: empty": (("eval", MODEL, "--perplexity", "/dev/null"), "/dev/null: has no text"),
    "text: endless": (("eval", MODEL, "--perplexity", "/dev/zero"), "more than 268435456 bytes"),
    "text: binary": (("eval", MODEL, "--perplexity", "binary"), "not UTF-8 (byte"),
    "keys: a folder": (("serve", MODEL, "--api-keys", "folder"), "Is a directory"),
    "run: a link to itself": (("export", "loop", "out"), "not the folder of a run"),
    "run: an endless number": (("export", "folder", "out", "--step", "9" * 5000), "--step: expe"),
    "recipe: a folder": (("train", "folder"), "Is a directory"),
    "recipe: binary": (("train", "binary"), "binary: not UTF-8 (byte 0)"),
    "tolerance: nan": (("verify", MODEL, "--tolerance", "nan"), "above 0, but is nan"),
    "model: a pipe as config": (("generate", "--model", "piped", "a"), "no regular file"),
    "schema: not UTF-8": ((*ROWS, "rows.jsonl", "--schema", "\udcff"), "neither a JSON object"),
    "seed of a score": ((*ROWS, "rows.jsonl", "--score", "--seed", "3"), "--seed: has no effect"),
    "float embeddings": (("chat", MODEL, "--float-embeddings"), "no effect without --quantize"),
    "body": (("serve", MODEL, "--max-body", "0"), "--max-body: expected 1 or more bytes, found 0"),
    "served name": (("serve", MODEL, "--served-model-name", ""), "expected a name, found an empty"),
    "request seconds": (("serve", MODEL, "--request-seconds", "nan"), "above 0, found nan"),
    "drain seconds": (("serve", MODEL, "--drain-seconds", "inf"), "0 or more, found inf"),
    "origin": (("serve", MODEL, "--cors-origin", "http://a:3000/"), "a slash at its end, found"),
    "rows of a plan": (("plan", MODEL, "--batch", str(2**70)), "batch: expected an integer from 1"),
    "ids of a plan": (
        ("plan", MODEL, "--topology", "cpu", "--batch", str(2**20), "--prompt", str(2**20)),
        "more than 1073741824 token ids",
    ),
    "topology": (("plan", MODEL, "--topology", "abacus"), "topology: unknown 'abacus'"),
    "a topology without chips": (("plan", MODEL, "--topology", "v5e:0x4"), "the sizes of a slice"),
    "no GPUs": (("plan", MODEL, "--topology", "h100:00"), "expected h100 or a number of them"),
    "slots of bounds": (("plan", MODEL, "--bounds", "--slots", "9"), "--slots: has no effect with"),
    "program of bounds": (
        ("plan", MODEL, "--bounds", "--program", "train"),
        "with --bounds, which",
    ),
    "scan": (
        ("plan", MODEL, "--topology", "cpu", "--program", "decode", "--scan-layers"),
        "scan_layers: has an effect on a training step only",
    ),
    "chat: no template": (
        (*ROWS, "rows.jsonl", "--chat"),
        "s_llama_tok has no chat template; leave",
    ),
    "chat: no template for a prompt": (
        ("generate", "--quiet", "--model", MODEL, "--chat", "a"),
        "--chat: " + MODEL,
    ),
    "ids": (("generate", "--input-ids", "[1,2"), "expected comma separated integers, found '[1,2'"),
    "column: no name": ((*ROWS, "rows.jsonl", "--prompt-column", ""), "found an empty text"),
    "cache: no name": (("chat", MODEL, "--compile-cache", ""), "--compile-cache: expected a path"),
    "adapter: no name": (("chat", MODEL, "--adapter", ""), "--adapter: expected a path, found an"),
    "seed of tasks": (
        ("eval", MODEL, "--tasks", "a", "--seed", "-1"),
        "--seed must be from 0 to 2",
    ),
    "plan: no name": (("plan", "", "--bounds"), "source: expected a path, found an empty text"),
    "a command": (("x\ny",), "no command 'x y'"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "model" / "config.json").mkdir(parents=True)
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "config.json")
    (tmp_path / "text").write_text("hello")
    (tmp_path / "binary").write_bytes(b"\x82\0" * 99)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    return tmp_path


@pytest.mark.in_ci("grammar: a long text", "text: endless")
@pytest.mark.parametrize(("words", "message"), CASES.values(), ids=CASES)
def test_one_line_and_exit_code_2(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    try:
        code = main(words)
    except SystemExit as left:  # of argparse
        code = left.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2
    assert message in line
    assert line.startswith("jaxllm")
    assert len(line) < 600


def test_quiet_jobs_say_that_no_row_succeeded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text('{"prompt": "a", "max_new_tokens": -1}\n')
    for resume in ([], ["--resume"]):
        assert main([*ROWS, "rows.jsonl", "--no-compile-cache", *resume]) == 1
        error = capsys.readouterr().err
        assert error == "no row succeeded: o.jsonl.errors.jsonl has the error of each\n"


@pytest.mark.by_default("words0")
@pytest.mark.parametrize("words", [["--version"], ["--help"]])
def test_help_to_a_full_disk(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jaxllm", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 2
    assert done.stderr == "jaxllm: error: nothing more can be written (No space left on device)\n"


@pytest.mark.parametrize(
    "words",
    [
        ["export", "~/run", "out"],
        ["eval", "model", "--perplexity", "~/run"],
    ],
)
def test_home_folders_are_expanded(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(words) == 2
    assert str(tmp_path / "run") in capsys.readouterr().err


def test_in_a_folder_that_was_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chdir(folder / "folder")  # `folder` changes back
    (folder / "folder").rmdir()
    assert main(["generate", "--model", "model", "a"]) == 2
    assert "the current folder has been removed" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may read all, without setpriv"
)
def test_folders_without_permissions(folder: Path) -> None:
    (folder / "closed").mkdir(mode=0)
    as_a_user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    commands = [["generate", "--model", "closed", "a"], [*ROWS, "closed/rows.jsonl"]]
    script = f"from jaxllm.cli.main import main; print(*map(main, {commands}))"
    done = subprocess.run(
        [
            *(as_a_user if os.geteuid() == 0 else []),
            *(sys.executable, "-c", script),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "2 2\n"
    assert done.stderr.count("\n") == 2
    assert done.stderr.count("Permission denied") == 2
