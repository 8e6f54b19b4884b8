"""A small model of each family as llama.cpp's converter writes it, and other real files."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np
import paths
import pytest

import jaxllm
from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.load import load_model, open_checkpoint
from jaxllm.common.errors import JaxLLMError
from jaxllm.models.registry import model_spec

DATA = paths.DATA / "gguf" / "families"
REFERENCE = json.loads((DATA / "reference.json").read_text())
MODELS = REFERENCE["models"]
LOST = {"mistral"}
"""Models whose window the format loses."""


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_those_of_the_model(name):
    with open_checkpoint(DATA / f"{name}.gguf").weights as view:
        digests = {
            tensor: hashlib.sha256(
                np.ascontiguousarray(view.read(tensor), np.float32).tobytes()
            ).hexdigest()[:16]
            for tensor in view.names()
        }
    assert digests == MODELS[name]["tensors"]


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LOST))
def test_the_config_computes_the_same(name):
    read, saved = (
        dataclasses.asdict(model_spec(config).config.forward_part())
        for config in (open_checkpoint(DATA / f"{name}.gguf").config, MODELS[name]["config"])
    )
    for epsilon in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        if epsilon in saved:
            saved[epsilon] = float(np.float32(saved[epsilon]))
    assert read == saved


@pytest.mark.ci
@pytest.mark.parametrize("name", sorted(MODELS.keys() - LOST))
def test_logits_are_those_of_transformers(name):
    model = load_model(open_checkpoint(DATA / f"{name}.gguf"))
    ids = np.array([REFERENCE["ids"]])
    decoder = {"decoder_input_ids": np.concatenate([[[0]], ids[:, :-1]], 1)} if "t5" in name else {}
    logits = np.asarray(model(ids, **decoder).logits)[0, -1]
    expected = np.load(DATA / "reference.npz")[name]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * expected.std())


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("llama3", ["<|eom_id|>", "<|end_of_text|>", "<|eot_id|>"]),
        ("qwen3moe", ["<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>"]),
        ("gemma2", ["<eos>", "<end_of_turn>"]),
        ("gemma3", ["<eos>", "<end_of_turn>"]),
        ("command-r", ["<|END_OF_TURN_TOKEN|>"]),  # and not <PAD>, which generate() masks
        ("gpt2", ["<|endoftext|>"]),
        ("t5", ["</s>"]),
    ],
)
def test_ends(name, ends):
    view = HFView(GGUFFile(DATA / f"{name}.gguf"))
    ids = view.generation["eos_token_id"]
    ids = [ids] if isinstance(ids, int) else ids
    tokens = view.file.metadata["tokenizer.ggml.tokens"]
    assert [tokens[index] for index in ids] == ends
    assert view.config["eos_token_id"] == ids[0]


def test_parts_of_which_the_first_has_no_tensors():
    """As llama-gguf-split writes them with --no-tensor-first-split."""
    whole = open_checkpoint(DATA / "mistral.gguf")
    parts = open_checkpoint(DATA / "split")
    assert parts.config == whole.config
    assert set(parts.weights.names()) == set(whole.weights.names())
    for name in whole.weights.names():
        np.testing.assert_array_equal(parts.weights.read(name), whole.weights.read(name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vocabulary", "holds no tensors, perhaps a vocabulary alone"),
        ("adapter", "general.type is 'adapter': a LoRA adapter; merge"),
        ("imatrix", "general.type is 'imatrix': an importance matrix"),
    ],
)
def test_files_that_are_no_model(name, message):
    path = DATA / "other" / f"{name}.gguf"
    with pytest.raises(JaxLLMError, match=message) as raised:
        jaxllm.load(path)
    assert str(raised.value).startswith(f"{path}: ")
