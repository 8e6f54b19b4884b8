"""Optional packages: the error for a missing one names its extra."""

from __future__ import annotations

import importlib
from typing import Any

from jaxllm.common.errors import DataError, MissingExtraError, UnsupportedError
from jaxllm.common.files import expanded


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Imports an optional module.

    Raises:
        MissingExtraError: it is not installed.

    >>> require("no_such_package", extra="plot", purpose="plots")
    Traceback (most recent call last):
    jaxllm.common.errors.MissingExtraError: plots need the package no_such_package: \
pip install 'jaxllm[plot]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as failure:
        package = module.split(".")[0]
        if failure.name is None or failure.name.split(".")[0] != package:
            raise  # installed, but one of its own dependencies is missing
        raise MissingExtraError(
            f"{purpose} need the package {package}: pip install 'jaxllm[{extra}]'"
        ) from None


def load_dataset(
    dataset: str, name: str | None = None, split: str = "train", *, field: str = "dataset"
) -> Any:
    """A `datasets.Dataset`: of a Hub id, a folder of files, or one that ``save_to_disk`` wrote.

    Args:
        name: its configuration.
        field: what names the data set, for messages.

    Raises:
        UnsupportedError: the package ``datasets`` is not installed.
        DataError: the data set cannot be loaded, or has no such split.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as failure:
        raise UnsupportedError(
            f"{field}: {dataset!r} needs the package datasets, which cannot be imported "
            f"({failure}): pip install 'jaxllm[datasets]'"
        ) from failure
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
