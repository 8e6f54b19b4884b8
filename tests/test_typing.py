"""Type checkers accept a user's program that imports the installed package."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from paths import ROOT

EXAMPLE = ROOT / "tests" / "typed_example.py"
CHECKERS = {
    "pyright": [sys.executable, "-m", "pyright", "--pythonpath"],
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--python-executable"],
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with jaxllm's files as installed, without the clone's folder.

    An editable installation would not show whether py.typed is among the files.
    """
    folder = tmp_path_factory.mktemp("typing") / "env"
    venv.create(folder, symlinks=os.name != "nt")
    names = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=names))
    python = Path(sysconfig.get_path("scripts", "venv", vars=names)) / Path("python")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    # Not into ROOT/build, whose old files setuptools would pack, too.
    settings = folder.with_name("setup.cfg")
    settings.write_text(f"[build]\nbuild_base = {folder.with_name('build')}\n")
    environment = os.environ | {"DIST_EXTRA_CONFIG": str(settings)}
    subprocess.run([*pip, str(ROOT)], env=environment, check=True, timeout=600)
    # The dependencies; the environment's own folder comes first.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.ci
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_program_is_typed(checker: str, installed: Path, tmp_path: Path):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    shutil.copy(EXAMPLE, tmp_path)
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [*CHECKERS[checker], str(installed), EXAMPLE.name]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
