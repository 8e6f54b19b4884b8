"""The page Install: what can run offline runs, and its list of extras is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import shell_blocks
from paths import ROOT
from test_packaging import PROJECT

PAGE = ROOT / "docs" / "install.md"
TEXT = PAGE.read_text(encoding="utf-8")
NOT_RUN = {
    "make demo": "creates .venv; the CI job starts from it",
    "pip install .\n": "downloads the dependencies; see test_packaging.py and make wheels",
    "pip install dist/": "make wheels installs and tries them",
    "pip install '.[cuda12]'": "needs a GPU",
    "pip install '.[tpu]'": "needs a TPU",
    "git clone ADDRESS": "ADDRESS stands for the address of the repository",
    "docker build": "needs Docker and a GPU",
}
"""How a block begins, and why no test runs it."""
CHECK = 'python -c "import jax; print(jax.devices())"'


def test_each_block_has_a_reason_not_to_run():
    for block in shell_blocks(PAGE):
        assert any(block.startswith(start) for start in NOT_RUN), block
    for start in NOT_RUN:
        assert any(block.startswith(start) for block in shell_blocks(PAGE)), start


def test_the_page_is_short():
    assert len(TEXT.split()) <= 750


def test_each_extra_is_listed():
    table = TEXT.partition("## Extras")[2].partition("## ")[0]
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([a-z0-9-]+)`", row)
    }
    assert listed == set(PROJECT["project"]["optional-dependencies"])


def test_named_files_exist():
    for name in ("cpu_kernels", "requirements/smollm2.txt", "deploy/Dockerfile"):
        assert name in TEXT
        assert (ROOT / name).exists()


def test_named_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)`", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("command", ["jaxllm doctor", "jaxllm --version", CHECK])
def test_commands_run(command: str, tmp_path: Path):
    assert command in TEXT
    line = command.replace("jaxllm", "python -m jaxllm").replace("python", f"'{sys.executable}'")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-e", "-c", line], cwd=tmp_path, env=environment, check=True)
