"""Folders with pytorch_model.bin that torch 2.13 and 1.13 wrote: families and kinds of file.

The references are those of data/torch_files/make_cases.py.
"""

from __future__ import annotations

import json
import shutil
import warnings

import jax
import numpy as np
import pytest
from paths import DATA

import jaxllm
from jaxllm.checkpoint.safetensors import write_sharded
from jaxllm.checkpoint.weight_files import open_weights

FOLDERS = DATA / "torch_files"
CASES = {
    name: np.array(values, np.float32)
    for path in sorted(FOLDERS.glob("cases_*.json"))
    for name, values in json.loads(path.read_text(encoding="utf-8")).items()
}
IDS = np.array([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
DECODER_IDS = np.array([[3, 17, 18, 19], [3, 20, 21, 22]])
QUICK = ("gpt2_hub", "t5_hub", "opt_shards", "bart_big_endian", "xglm_torch113")
"""Folders of the tests that always run; CI runs the others too."""


def marked(names):
    marks = {name: () if name in QUICK else pytest.mark.ci for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def logits(model) -> np.ndarray:
    decoder = {"decoder_input_ids": DECODER_IDS} if model.is_encoder_decoder else {}
    return np.asarray(model(IDS, attention_mask=MASK, **decoder).logits)


@pytest.mark.parametrize("name", marked(CASES))
def test_logits_are_those_of_torch(name):
    expected = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if "training" in name else "error")
        model, _ = jaxllm.load(FOLDERS / name)
    actual = logits(model)
    mask = MASK if expected.shape[1] == MASK.shape[1] else np.ones(DECODER_IDS.shape, int)
    real = mask.astype(bool)
    assert expected[real].std() >= 1
    assert np.abs(actual - expected)[real].max() < 1e-4 * expected[real].std()


def test_every_folder_has_a_case():
    assert sorted(CASES) == sorted(path.name for path in FOLDERS.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", ["bloom_one_storage", "gpt_neo_strided", "opt_shards"])
def test_weights_are_those_of_safetensors(name, tmp_path):
    """Also when every device of a mesh reads its own slices of strided tensors."""
    with open_weights(FOLDERS / name) as source:
        tensors = {each: np.array(source.read(each)) for each in source.names()}
    shutil.copytree(
        FOLDERS / name, tmp_path / "copy", ignore=shutil.ignore_patterns("pytorch_model*")
    )
    write_sharded(tmp_path / "copy", tensors)
    expected, _ = jaxllm.load(tmp_path / "copy")
    for options in ({}, {"mesh": jaxllm.make_mesh()}, {"scan_layers": True}):
        actual, _ = jaxllm.load(FOLDERS / name, **options)
        if "scan_layers" not in options:
            jax.tree.map(np.testing.assert_array_equal, actual, expected)
        np.testing.assert_allclose(logits(actual), logits(expected), rtol=0, atol=1e-4)


def test_a_saved_model_has_the_tensors_of_the_file(tmp_path):
    model, _ = jaxllm.load(FOLDERS / "marian_zip")
    jaxllm.save_hf(tmp_path, model)
    with open_weights(FOLDERS / "marian_zip") as old, open_weights(tmp_path) as new:
        assert sorted(old.names()) == sorted(new.names())
        for name in old.names():
            np.testing.assert_array_equal(old.read(name), new.read(name))


def test_a_wrapper_is_named():
    with pytest.warns(
        UserWarning, match=r"under 'state_dict'.*'epoch', 'best', 'arch' beside"
    ) as said:
        jaxllm.load(FOLDERS / "llama_in_training")
    assert len(said) == 1
    assert "'module.' is removed" in str(said[0].message)
    assert "pytorch_model.bin" in str(said[0].message)
