"""Messages of errors are of bounded length, and name paths that no system accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.batch.memory import memory_budget
from jaxllm.checkpoint.hub import resolve
from jaxllm.common.files import RunLock
from jaxllm.common.optional_packages import require
from jaxllm.errors import InputError, JaxLLMError, MissingExtraError, MissingFileError, RunError
from jaxllm.training.run import read_recipe


def test_long_messages_are_cut_in_the_middle() -> None:
    error = MissingFileError("a" * 5000 + ": no such file")
    assert len(str(error)) == 500
    assert str(error).startswith("aaa")
    assert str(error).endswith("aaa: no such file")
    assert str(InputError("x" * 500)) == "x" * 500


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000])
def test_impossible_paths(path: str) -> None:
    with pytest.raises(MissingFileError):
        resolve(Path(path))
    with pytest.raises(JaxLLMError):
        read_recipe(Path(path))
    with pytest.raises(RunError):
        RunLock(Path(path))


@pytest.mark.parametrize("memory", ["1e999GB", "infGB", "nanGB", "9" * 400 + "GB", "-1", ""])
def test_impossible_memory(memory: str) -> None:
    with pytest.raises(InputError, match="memory"):
        memory_budget(memory, 1)


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed, but a package that it needs is not."""
    (tmp_path / "broken_package.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    reason = r"package broken_package, which cannot be imported \(No module named 'no_such_pack"
    with pytest.raises(MissingExtraError, match=reason):
        require("broken_package", extra="plot", purpose="plots")
