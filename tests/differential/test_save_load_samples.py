"""Stored files of transformers and adapters of PEFT, read, merged and saved by jaxllm."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_files import (
    LOGITS_CLOSE,
    bits,
    is_buffer,
    merge_difference,
    read_file,
    read_tensors,
    token_inputs,
)
from helpers import SAMPLES

import jaxllm
from jaxllm.checkpoint.peft import load_adapter
from jaxllm.models.lora import merge_lora

FILES = sorted((SAMPLES / "save_load").glob("file_*"))
MERGES = sorted((SAMPLES / "save_load").glob("merge_*"))


@pytest.mark.parametrize("folder", FILES, ids=lambda folder: folder.name)
def test_files_keep_their_bytes_and_give_the_reference_s_logits(folder: Path, tmp_path: Path):
    case = json.loads((folder / "case.json").read_text())
    jaxllm.save_hf(tmp_path, jaxllm.load(folder)[0], max_shard_bytes=case["saved_shard_bytes"])
    before, after = read_tensors(folder), read_tensors(tmp_path)
    assert {name: bits(x) for name, x in after.items()} == {
        name: bits(x) for name, x in before.items() if not is_buffer(name)
    }
    model = jaxllm.load(folder, dtype="float32", param_dtype="float32")[0]
    logits = jax.jit(lambda net: net(**token_inputs(case)).logits)(model)
    expected = np.load(folder / "logits.npz")["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=LOGITS_CLOSE)


@pytest.mark.parametrize("folder", MERGES, ids=lambda folder: folder.name)
def test_merged_adapters_are_those_of_peft(folder: Path, tmp_path: Path):
    base = jaxllm.load(folder / "base")[0]
    jaxllm.save_hf(tmp_path, merge_lora(load_adapter(base, folder / "adapter")))
    base_tensors, merged = read_tensors(folder / "base"), read_tensors(tmp_path)
    changed = read_file(folder / "changed.safetensors")
    assert merge_difference({name: merged[name] for name in changed}, changed) == ""
    assert merge_difference({name: base_tensors[name] for name in changed}, changed) != ""
    same = base_tensors.keys() - changed.keys()
    assert all((merged[name] == base_tensors[name]).all() for name in same)
