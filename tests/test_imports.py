"""The rooms of the house import downwards only, and nothing imports another framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxllm"

# From the top down: a room imports from itself and from the rooms below it. Modules directly under
# jaxllm/ that are not listed (loading, ...) are the public API: below training and the commands.
ROOMS = [
    {"cli", "__main__"},
    {"training"},
    {"api"},
    {"generation"},
    {"checkpoint"},
    {"tokenizers"},
    {"models"},
    {"nn"},
    {"cache", "cache_kinds", "placement", "sharding", "view"},
    {"errors", "json_file", "compile_clock", "extras", "processes", "whole_file"},
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
FOREIGN = {"torch", "transformers", "tensorflow", "keras"}
# The one module that compares with the reference, and imports it inside a function.
COMPARES = PACKAGE / "cli" / "verify.py"
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """The room of a dotted name such as ``jaxllm.models.llama``."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "api"
    return name if name in LEVEL else "api"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> list[str]:
    """Dotted names of everything that is imported, anywhere in a file, also by name."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names += [a.value for a in node.args if isinstance(a, ast.Constant)]
    return names


def upward(importer: str, name: str) -> bool:
    """Whether an import goes up the list of rooms."""
    # `from jaxllm import load` names an API, `from jaxllm import errors` a module.
    return name.split(".")[0] == "jaxllm" and LEVEL[room_of(name)] < LEVEL[room_of(importer)]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    importer = module_name(path)
    assert [name for name in imported(tree) if upward(importer, name)] == []


def test_the_rule_can_fail() -> None:
    assert upward("jaxllm.models.llama", "jaxllm.generation.config")
    assert upward("jaxllm.models.llama", "jaxllm.load")
    assert upward("jaxllm.loading", "jaxllm.cli.exits")
    assert not upward("jaxllm.cli.generate", "jaxllm.load")
    assert not upward("jaxllm.generation.config", "jaxllm.json_file.read_json")
    assert imported(ast.parse("import importlib\nimportlib.import_module('torch')"))[-1] == "torch"


def test_every_package_has_a_level() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_other_framework(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = FOREIGN.intersection(name.split(".")[0] for name in imported(tree))
    if path == COMPARES:
        at_import = ast.Module(
            [node for node in tree.body if not isinstance(node, ast.FunctionDef)], []
        )
        found = FOREIGN.intersection(name.split(".")[0] for name in imported(at_import))
    assert found == set()


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_is_quick_and_light() -> None:
    code = (
        "import sys, time; import jax, flax.nnx; start = time.process_time(); import jaxllm\n"
        "print(time.process_time() - start, *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    seconds, *modules = run_python(code).split()
    assert float(seconds) < 2
    assert not FOREIGN.intersection(modules)
