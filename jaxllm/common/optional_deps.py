"""Imports optional packages; the error for a missing one names its extra."""

from __future__ import annotations

import importlib
from typing import Any

from jaxllm.common.errors import MissingExtraError


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
