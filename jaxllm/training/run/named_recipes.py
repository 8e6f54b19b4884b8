"""The recipes that come with the package, by name: ``jaxllm train smollm2_lora_chat``.

They are the files of ``configs/`` in the repository. A wheel holds copies under
``jaxllm/recipes``. A recipe that is run by its name is unpacked into the cache folder with its
data, where it can be read and copied.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import runpy
import tempfile
from pathlib import Path

import jaxllm
from jaxllm.common.compiling import cache_folder
from jaxllm.common.errors import MissingFileError, RunError, naming_file
from jaxllm.common.files import write_whole

PACKAGE = Path(jaxllm.__file__).parent
FOLDERS = (PACKAGE / "recipes", PACKAGE.parent / "configs")
"""Folder of the recipes in an installed package, and in a clone of the repository."""
DATA_SCRIPT = "make_data.py"


def recipes() -> dict[str, Path]:
    """The recipes by name.

    >>> sorted(recipes())[:2]
    ['gpt2_bytes', 'llama_classification']
    """
    for folder in FOLDERS:
        if (folder / DATA_SCRIPT).is_file():
            return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    return {}


def description(recipe: Path) -> str:
    """The first sentence of a recipe's comment, for a list."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("# ") for line in lines if not line.startswith("# yaml-"))


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or the name of a recipe that comes with the package.

    The latter is unpacked with its data, if it is not yet.

    Raises:
        MissingFileError: there is neither.
        RunError: the cache folder cannot be written.
    """
    path = Path(os.path.expanduser(name))
    if os.path.lexists(path) or path.suffix or path.name != name:
        return path
    known = recipes()
    if name in known:
        return _unpacked(known[name])
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; is it {near[0]}?" if near else ""
    raise MissingFileError(
        f"{name}: no such file, and no recipe of this name{hint} (`jaxllm train --list` names all)"
    )


def _unpacked(recipe: Path) -> Path:
    """A copy of the recipe in the cache folder, beside its data."""
    script = recipe.with_name(DATA_SCRIPT)
    version = hashlib.sha256(script.read_bytes()).hexdigest()[:12]
    folder = cache_folder() / "recipes" / version
    copy, data = folder / recipe.name, folder / "data"
    with naming_file(folder, RunError, "written"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(copy, recipe.read_bytes())
        if not data.is_dir():
            with tempfile.TemporaryDirectory(dir=folder) as partial:
                runpy.run_path(str(script))["write_data"](Path(partial) / "data")
                try:
                    (Path(partial) / "data").rename(data)
                except OSError:
                    if not data.is_dir():  # otherwise another process was faster
                        raise
    return copy
