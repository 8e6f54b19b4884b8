"""Optional files: what has the name of a file and cannot be read is not taken for absent."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from parity_data import ROOT

from jaxllm.checkpoint.load import open_checkpoint
from jaxllm.common.errors import CheckpointError, ConfigError, JaxLLMError, TokenizerError
from jaxllm.loading import read_generation_config
from jaxllm.tokenizers import load_tokenizer


def read_all(folder: Path) -> None:
    """Reads every optional file of a checkpoint."""
    load_tokenizer(folder)
    with (checkpoint := open_checkpoint(folder)).weights:
        read_generation_config(checkpoint)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tokenizer.json", TokenizerError),
        ("tokenizer_config.json", TokenizerError),
        ("special_tokens_map.json", TokenizerError),
        ("chat_template.jinja", TokenizerError),
        ("generation_config.json", ConfigError),
        ("model.safetensors", CheckpointError),
    ],
)
def test_links_to_missing_files_and_folders_are_refused(
    tmp_path: Path, name: str, error: type[JaxLLMError]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "gpt2_base", folder)
    read_all(folder)
    path, blob = folder / name, tmp_path / "blob"
    path.unlink(missing_ok=True)
    path.symlink_to(blob)
    with pytest.raises(error, match=rf"{name}: is a link to .*blob, which is missing"):
        read_all(folder)
    path.unlink()
    for make in (os.mkfifo, os.mkdir):
        make(path)
        with pytest.raises(error, match=rf"{name}: is no regular file"):
            read_all(folder)
        path.rename(tmp_path / make.__name__)
