"""Packages import one way only, and nothing imports another framework."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "jaxllm"

# From the top down: a package imports from itself and from those below it. A folder that is not
# listed belongs to the package around it; modules directly under jaxllm/ that are not listed
# (loading, ...) are the public functions, below the commands, training and batches.
LAYERS = [
    {"cli", "__main__"},
    {"planning"},
    {"training.run"},
    {"training.monitor"},
    {"training.evaluation"},
    {"training.data"},
    {"training"},
    {"serve", "evaluate"},
    {"batch.job"},
    {"batch"},
    {"flax_classes"},
    {"api"},
    {"contrib"},
    {"generation"},
    {"generation.scoring"},
    {"generation.call"},
    {"generation.registration"},
    {"generation.strategies"},
    {"generation.request"},
    {"generation.stopping"},
    {"generation.processors"},
    {"generation.settings"},
    {"generation.inputs"},
    {"checkpoint"},
    {"tokenizers"},
    {"models"},
    {"nn"},
    {"cache"},
    {"parallel"},
    {"common"},
]
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
# The top of the package gathers what people call from the layers above the public functions too.
# jaxllm.generation has the names of the watermarks, imported on first use.
# A field names the module that a call imports when it sets the field.
GATHERS = {
    "jaxllm": {"jaxllm.batch", "jaxllm.planning", "jaxllm.training.run"},
    "jaxllm.generation": {"jaxllm.contrib"},
    "jaxllm.generation.settings.config": {"jaxllm.contrib"},
}
FOREIGN = {"torch", "transformers", "tensorflow", "keras"}
ENGINE = ("jaxllm.generation", "jaxllm.batch")
# The one module that compares with the reference, and imports it inside a function.
COMPARES = PACKAGE / "cli" / "verify.py"
MODULE = re.compile(r"jaxllm(\.\w+)+")
FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(module: str) -> str:
    """The listed package of a dotted name such as ``jaxllm.models.llama``.

    ``jaxllm.generation`` is the package that gathers its own folders, so its level is theirs at
    the top; so is that of ``jaxllm.training`` at the bottom, whose files its folders build on.
    """
    parts = module.split(".")[1:]
    for length in (2, 1):
        name = ".".join(parts[:length])
        if name in LEVEL:
            return name
    return "api"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> list[str]:
    """Dotted names of everything that is imported, anywhere in a file, also by a string."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names += [a.value for a in node.args if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            names.append(node.value)  # a module that another function imports, such as a provider
    return names


def upward(importer: str, name: str) -> bool:
    """True if an import goes up the list of packages."""
    if name.split(".")[0] != "jaxllm":
        return False
    if any(name.startswith(allowed) for allowed in GATHERS.get(importer, ())):
        return False
    return LEVEL[package_of(name)] < LEVEL[package_of(importer)]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    importer = module_name(path)
    assert [name for name in imported(tree) if upward(importer, name)] == []


def test_the_rule_can_fail() -> None:
    assert upward("jaxllm.models.llama", "jaxllm.generation.settings.config")
    assert upward("jaxllm.models.llama", "jaxllm.load")
    assert upward("jaxllm.loading", "jaxllm.cli.process")
    assert upward("jaxllm.loading", "jaxllm.batch.generator")
    assert upward("jaxllm.generation.settings.config", "jaxllm.generation.strategies.sample")
    assert upward("jaxllm.generation.call.prepare", "jaxllm.generation.loop")
    assert not upward("jaxllm.generation.loop", "jaxllm.generation.strategies.sample")
    assert not upward("jaxllm.cli.generate", "jaxllm.load")
    assert not upward("jaxllm.generation.settings.config", "jaxllm.common.files.read_json")
    assert imported(ast.parse("import importlib\nimportlib.import_module('torch')"))[-1] == "torch"
    assert imported(ast.parse("setting(provider='jaxllm.contrib')")) == ["jaxllm.contrib"]
    assert upward("jaxllm.generation.settings.fields", "jaxllm.contrib")


def of_engine(text: str) -> set[str]:
    """What a file imports of generation and of batches."""
    names = imported(ast.parse(text))
    return {name for name in names if any(f"{name}.".startswith(f"{top}.") for top in ENGINE)}


def test_planning_imports_one_name_of_the_engine() -> None:
    files = (PACKAGE / "planning").rglob("*.py")
    found = set[str]().union(*(of_engine(path.read_text(encoding="utf-8")) for path in files))
    assert found == {"jaxllm.batch.programs.programs"}
    wrong = "from jaxllm.batch import slots\ndef f():\n    import jaxllm.generation.loop"
    assert of_engine(wrong) == {"jaxllm.batch.slots", "jaxllm.generation.loop"}


def test_every_package_has_a_level() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= LEVEL.keys()
    for split in ("generation", "training"):
        inner = {f"{split}.{path.parent.name}" for path in PACKAGE.glob(f"{split}/*/__init__.py")}
        assert inner <= LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_other_framework(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    actual = FOREIGN.intersection(name.split(".")[0] for name in imported(tree))
    if path == COMPARES:
        at_import = ast.Module(
            [node for node in tree.body if not isinstance(node, ast.FunctionDef)], []
        )
        actual = FOREIGN.intersection(name.split(".")[0] for name in imported(at_import))
    assert actual == set()


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.ci
def test_import_is_light() -> None:
    code = (
        "import sys, jaxllm; at_import = {name.split('.')[0] for name in sys.modules}\n"
        "import jaxllm.cli.generate\n"
        "print(*{'jax', 'flax', 'numpy'} & at_import, 'then')\n"
        "print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules}))"
    )
    at_import, modules = (words.split() for words in run_python(code).split("then"))
    assert at_import == []
    assert not FOREIGN.intersection(modules)
    others = {"jaxllm.training", "jaxllm.serve", "jaxllm.evaluate"}
    assert not {"pydantic", "matplotlib", "lm_eval", *others}.intersection(modules)
