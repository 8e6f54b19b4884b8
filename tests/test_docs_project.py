"""Pages on planning, speed and benchmarks: their Python runs, and their commands exist."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from pages import run_python
from paths import DATA, ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.ci
def test_planning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU. Its shell blocks need the compiler of a TPU or GPU."""
    folder = tmp_path / "path" / "to" / "llama"
    folder.mkdir(parents=True)
    shutil.copy(DATA / "reference" / "tiny-llama" / "config.json", folder)
    monkeypatch.chdir(tmp_path)
    names, printed = run_python(ROOT / "docs" / "plan.md")
    assert printed == f"{names['result'].programs[0].peak_bytes}\n"


COMMANDS = [
    (page.name, line)
    for page in (BENCHMARKS / "README.md", ROOT / "docs" / "performance.md")
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    if line.startswith("python benchmarks/")
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_benchmarks_exist_with_their_options(page: str, command: str) -> None:
    """They are not run: they need other libraries' environments, or take minutes to hours."""
    _, script, *arguments = command.split("#")[0].split()
    sources = [ROOT / script, BENCHMARKS / "runner.py"]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    flags = [argument for argument in arguments if argument.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in text] == []


def test_every_benchmark_is_described() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    scripts = {
        path.name
        for path in BENCHMARKS.glob("*.py")
        if re.search(r"^if __name__ == ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert [name for name in sorted(scripts) if f"benchmarks/{name}" not in text] == []
