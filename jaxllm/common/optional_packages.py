"""Packages that are imported when they are needed; the error for a missing one names its extra."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxllm.common.errors import DataError, MissingExtraError
from jaxllm.common.files import expanded


def install_command(extra: str) -> str:
    """The command that installs an extra: from the folder of a clone, else from the index."""
    clone = Path(__file__).parents[2]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install 'jaxllm[{extra}]'"
    return f"pip install -e '{'.' if clone == Path.cwd() else clone}[{extra}]'"


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Imports an optional module.

    Raises:
        MissingExtraError: it is not installed, or cannot be imported.

    >>> require("no_such_package", extra="plot", purpose="plots")
    Traceback (most recent call last):
    jaxllm.common.errors.MissingExtraError: plots need the package no_such_package: pip install ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as failure:
        package = module.split(".")[0]
        is_missing = (failure.name or "").split(".")[0] == package
        # Installed, but a dependency of its own is missing, or of another version.
        reason = "" if is_missing else f", which cannot be imported ({failure})"
        raise MissingExtraError(
            f"{purpose} need the package {package}{reason}: {install_command(extra)}"
        ) from failure


def import_untyped(module: str) -> Any:
    """Imports a module that jaxllm depends on and that has no types, on first use."""
    return importlib.import_module(module)


def installed_files(package: str) -> list[Path] | None:
    """Paths of a package's files, without importing it; None if it is not installed."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        return None
    return [Path(str(file.locate())) for file in files]


def load_dataset(
    dataset: str, name: str | None = None, split: str = "train", *, field: str = "dataset"
) -> Any:
    """A `datasets.Dataset`: of a Hub id, a folder of files, or one that ``save_to_disk`` wrote.

    Args:
        name: its configuration.
        field: what names the data set, for messages.

    Raises:
        MissingExtraError: the package ``datasets`` is not installed.
        DataError: the data set cannot be loaded, or has no such split.
    """
    datasets = require("datasets", extra="datasets", purpose=f"data sets such as {dataset!r}")
    folder = expanded(dataset)
    has_splits, is_one = ((folder / n).is_file() for n in ("dataset_dict.json", "state.json"))
    if name is not None and (has_splits or is_one):
        raise DataError(f"dataset_name: has no effect with the saved data set {folder}")
    if split != "train" and is_one:
        raise DataError(f"split: has no effect, {folder} holds one data set and no splits")
    try:
        if has_splits:
            return datasets.load_from_disk(str(folder))[split]
        if is_one:
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(dataset, name, split=split)
    except Exception as failure:  # of many kinds: the Hub's, Arrow's, the file system's
        raise DataError(
            f"{field}: {dataset!r}, split {split!r}, cannot be loaded "
            f"({type(failure).__name__}: {failure})"
        ) from failure
