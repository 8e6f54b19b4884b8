"""The package on a system without the calls that only POSIX has, such as Windows (simulated)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from tiny_runs import write_recipe

import jaxllm
from jaxllm.tokenizers.byte_level import byte_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
WITHOUT_POSIX = """
import os, signal, sys
import asyncio, psutil  # which have parts of their own for each system
for name in ("fork", "forkpty", "pread", "pwrite", "sysconf", "getuid", "nice", "mkfifo"):
    vars(os).pop(name, None)
for name in ("SIGHUP", "SIGCHLD", "SIGKILL", "SIGUSR1", "setitimer"):
    vars(signal).pop(name, None)
sys.modules["resource"] = None  # importing it fails
os.environ["JAXLLM_CACHE_DIR"] = "programs"
"""
LIBRARY = """
import jaxllm
model, tokenizer = jaxllm.load("model")
texts = jaxllm.generate_texts(model, ["Hello", "Hi"], tokenizer=tokenizer, max_new_tokens=4)
assert len(texts) == 2, texts
engine = jaxllm.BatchGenerator(model, tokenizer, slots=2, max_new_tokens=4)
rows = [{"prompt": text} for text in ("Hello", "Hi", "Hey")]
assert len(engine.generate(rows)) == 3
"""
COMMANDS = """
import io
from jaxllm.cli.main import main
assert main(["generate", "--model", "model", "--max-new-tokens", "4", "Hello"]) == 0
rows = ["--input", "rows.jsonl", "--output", "out.jsonl", "--slots", "2"]
assert main(["generate", "--model", "model", "--max-new-tokens", "4", *rows]) == 0
sys.stdin = io.StringIO("Hello\\n/exit\\n")
assert main(["chat", "model", "--max-new-tokens", "4"]) == 0
assert main(["train", sys.argv[1], "--no-compile-cache"]) == 0
assert main(["train", sys.argv[1], "--resume", "--max-steps", "3", "--no-compile-cache"]) == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("platform")
    tokenizer = byte_tokenizer()
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    jaxllm.save_hf(
        path / "model", tiny.make("llama", vocab_size=len(tokenizer), **special), tokenizer
    )
    jaxllm.auto.AutoTokenizer.from_pretrained(path / "model", chat_template=TEMPLATE).save(
        path / "model"
    )
    rows = ({"prompt": text} for text in ("Hello", "Hi", "Hey"))
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(program: str, folder: Path, *arguments: object) -> str:
    command = [sys.executable, "-c", WITHOUT_POSIX + program, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library(folder: Path) -> None:
    run(LIBRARY, folder)


@pytest.mark.ci
def test_generate_batch_chat_and_train(folder: Path, tmp_path: Path) -> None:
    out = run(COMMANDS, folder, write_recipe(tmp_path, max_steps=2))
    assert (folder / "out.jsonl").read_text().count("\n") == 3
    assert "step 2" in out
    assert "step 3" in out
