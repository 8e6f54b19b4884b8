"""Adapters of PEFT for a resized vocabulary, and with rows for single tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from paths import DATA
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.checkpoint.peft import load_adapter, save_adapter
from jaxllm.common.errors import CheckpointError, ConfigError, UnsupportedError
from jaxllm.models.lora import merge_lora

ROOT = DATA / "peft_resized"
NAMES = sorted(path.name for path in ROOT.iterdir() if path.is_dir())


def base(name: str):
    config = json.loads((ROOT / name / "adapter_config.json").read_text())
    return jaxllm.load(DATA / "conformance" / "models" / config["base_model_name_or_path"])[0]


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / name / "expected.npz") as file:
        return dict(file)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "llama_saved", tmp_path / "adapter"))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_peft(name, tmp_path):
    given = expected(name)
    logits, tokens = given.pop("logits"), int(given.pop("tokens"))
    resized = base(name).resize_token_embeddings(tokens)
    assert logits.std() > 1
    model = load_adapter(resized, ROOT / name)
    np.testing.assert_allclose(model(**given).logits, logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(merge_lora(model)(**given).logits, logits, rtol=0, atol=1e-4)
    if name.startswith("llama"):  # its own files hold the matrices, too
        save_adapter(tmp_path, model)
        again = load_adapter(resized, tmp_path)
        np.testing.assert_array_equal(again(**given).logits, model(**given).logits)
    else:
        with pytest.raises(UnsupportedError, match="used in several places"):
            save_adapter(tmp_path, model)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama_tokens"])
def test_before_the_resize_the_error_says_what_to_do(name):
    tokens = int(expected(name)["tokens"])
    with pytest.raises(CheckpointError, match=rf"model\.resize_token_embeddings\({tokens}\)"):
        load_adapter(base(name), ROOT / name)


def test_heads_that_differ_from_a_tied_embedding(tmp_path):
    folder = Path(shutil.copytree(ROOT / "gpt2_tied", tmp_path / "adapter"))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, file)
    resized = base("gpt2_tied").resize_token_embeddings(160)
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight differs from transformer\.wte"):
        load_adapter(resized, folder)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([3, "5"], ConfigError, "trainable_token_indices: expected lists of token ids"),
        ([3, -1], ConfigError, "trainable_token_indices: expected lists of token ids"),
        ({"embed_tokens": 3}, ConfigError, "trainable_token_indices: expected lists of token ids"),
        ([3, 5], CheckpointError, r"trainable_token_indices names 2 of 131 tokens"),
        ([3, 5, 999], CheckpointError, r"trainable_token_indices names 3 of 131 tokens"),
        ({"lm_head": [3, 5, 7]}, CheckpointError, "trainable_token_indices does not name"),
        (None, CheckpointError, "trainable_token_indices does not name"),
    ],
)
def test_tokens_that_do_not_fit(rows, error, message):
    model = base("llama_tokens")
    with pytest.raises(error, match=message):
        load_adapter(model, ROOT / "llama_tokens", config={"trainable_token_indices": rows})


def test_copies_of_a_trained_matrix_that_differ(copy):
    file = copy / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.modules_to_save.weight"] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.modules_to_save\.weight differs from"):
        load_adapter(base("llama_saved").resize_token_embeddings(60), copy)
