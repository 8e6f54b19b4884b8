"""The command that a message gives for a missing package fits how jaxllm is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.common import optional_packages
from jaxllm.common.optional_packages import install_command


def test_a_clone_installs_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "clone" / "jaxllm" / "common" / "optional_packages.py"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(optional_packages, "__file__", str(file))
    assert install_command("verify") == "pip install 'jaxllm[verify]'"  # as in site-packages
    (tmp_path / "clone" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert install_command("verify") == f"pip install -e '{tmp_path}/clone[verify]'"
    monkeypatch.chdir(tmp_path / "clone")
    assert install_command("verify") == "pip install -e '.[verify]'"


def test_messages_name_extras_by_this_command_alone():
    folder = Path(optional_packages.__file__).parents[1]
    for file in folder.rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if "pip install 'jaxllm[" in line and file.name != "optional_packages.py":
                assert "``" in line, f"{file}: {line}"  # of a docstring
