"""Every seeded fault applies to the present code; `run.py` says whether the tests catch it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PATCHES = sorted(FOLDER.glob("*.patch"))


@pytest.mark.skipif(shutil.which("git") is None, reason="applies patches with git")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies(patch: Path) -> None:
    # `git apply` needs no repository, but one around this folder would hide the files from it.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    command = ["git", "apply", "--check", "--verbose", str(patch)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"port {patch.name} to the present code: {done.stderr}"
    assert "Checking patch jaxllm/" in done.stderr, f"{patch.name} changes nothing of the package"


def test_patches_are_numbered_and_described() -> None:
    assert len(PATCHES) >= 50
    for number, patch in enumerate(PATCHES, start=1):
        assert patch.name.startswith(f"{number:02}_")
        assert patch.read_text().startswith("# "), f"{patch.name}: say what the mistake breaks"
