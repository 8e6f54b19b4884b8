from __future__ import annotations

import json
from pathlib import Path

import paths
import pytest

from jaxllm.tokenizers import Tokenizer, load_tokenizer

DATA = paths.DATA / "tokenizers"


@pytest.fixture(scope="session")
def fast_cases() -> dict:
    """Reference ids and texts of transformers 5.23 over the vocabularies in fast/."""
    return json.loads((DATA / "fast_cases.json").read_text(encoding="utf-8"))["tokenizers"]


@pytest.fixture(scope="session")
def chat_templates() -> dict:
    return json.loads((DATA / "chat_templates.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def fast_folder(tmp_path_factory, fast_cases):
    """Writes the folder of one reference tokenizer, with changes to its tokenizer_config.json."""

    def write(name: str, **config) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "tokenizer.json").write_bytes((DATA / "fast" / f"{name}.json").read_bytes())
        options = {**fast_cases[name]["config"], **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
        return folder

    return write


@pytest.fixture(scope="session")
def load_fast(fast_folder):
    def load(name: str, **config) -> Tokenizer:
        tokenizer = load_tokenizer(fast_folder(name, **config))
        assert tokenizer is not None
        return tokenizer

    return load
