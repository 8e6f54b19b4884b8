"""Folders that transformers 4.57's Flax classes wrote: every family, head and kind of file.

The references are those of data/flax_files/make_cases.py.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from paths import DATA

import jaxllm
from jaxllm import flax_classes
from jaxllm.checkpoint.flax_file import FlaxFile
from jaxllm.errors import InputError

FOLDERS = DATA / "flax_files"
FILE = json.loads((FOLDERS / "cases.json").read_text(encoding="utf-8"))
IDS, MASK, DECODER_IDS = (np.array(FILE[name]) for name in ("ids", "mask", "decoder_ids"))
OWN = {case["folder"]: np.array(case["output"]) for case in FILE["cases"] if not case["config"]}
OTHER = [case for case in FILE["cases"] if case["config"]]
QUICK = ("t5", "gpt2", "gpt2_base", "llama_tied", "bart")
"""Folders of the tests that always run; CI runs the others too."""


def marked(folders) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.ci)
        for name in sorted(folders)
    ]


def with_config(folder: str, tmp_path: Path, **fields: Any) -> Path:
    """A copy of the folder with other fields in config.json."""
    shutil.copytree(FOLDERS / folder, tmp_path / folder)
    path = tmp_path / folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path.parent


def output(model) -> np.ndarray:
    """The first output of the class that the folder names, as transformers gives it."""
    if not model.is_encoder_decoder:
        out = model(IDS, attention_mask=MASK)
        return np.asarray(getattr(out, "logits", None) if hasattr(out, "logits") else out[0])
    return np.asarray(model(IDS, attention_mask=MASK, decoder_input_ids=DECODER_IDS).logits)


def hidden(model) -> np.ndarray:
    """The last hidden states, which an encoder-decoder's class without a head gives."""
    out = model(IDS, attention_mask=MASK, decoder_input_ids=DECODER_IDS, output_hidden_states=True)
    return np.asarray(out.decoder_hidden_states[-1])


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference at real tokens, in standard deviations of the reference."""
    mask = MASK[..., None] if expected.shape[1] == MASK.shape[1] else 1
    assert actual.shape == expected.shape
    return float(np.abs((actual - expected) * mask).max() / expected.std())


def computed(model, folder: str) -> np.ndarray:
    is_headless = folder.endswith("_base") and model.is_encoder_decoder
    return hidden(model) if is_headless else output(model)


@pytest.mark.parametrize("folder", marked(OWN))
def test_outputs_are_those_of_the_flax_class(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = jaxllm.load(FOLDERS / folder)
    assert OWN[folder].std() >= 1
    assert difference(computed(model, folder), OWN[folder]) < 1e-4


@pytest.mark.parametrize(
    ("folder", "base", "tolerance"),
    [
        ("t5_shards", "t5", 1e-4),
        ("opt_shards", "opt", 1e-4),
        ("gpt2_safetensors", "gpt2", 1e-4),
        ("bart_safetensors", "bart", 1e-4),
        ("gpt2_chunks", "gpt2", 1e-4),
        ("bart_bf16", "bart", 0.1),
        ("bart_fp16", "bart", 0.01),
    ],
)
def test_other_kinds_of_files_hold_the_same_weights(folder, base, tolerance):
    model, _ = jaxllm.load(FOLDERS / folder, dtype="float32", param_dtype="float32")
    assert difference(output(model), OWN[base]) < tolerance


def test_the_first_of_opts_shards_is_empty():
    shards = sorted((FOLDERS / "opt_shards").glob("*.msgpack"))
    assert shards[0].read_bytes() == b"\x80"


def tree(folder: str) -> dict[str, Any]:
    with FlaxFile(FOLDERS / folder / "flax_model.msgpack") as file:
        return unflatten_dict({tuple(name.split("/")): file.read(name) for name in file.names()})


def flax_class(folder: str) -> Any:
    config = json.loads((FOLDERS / folder / "config.json").read_text(encoding="utf-8"))
    return getattr(flax_classes, f"Flax{config['architectures'][0]}")


HAVE_CLASSES = [
    folder for folder in OWN
    if not folder.endswith("_base") or not json.loads(
        (FOLDERS / folder / "config.json").read_text(encoding="utf-8")
    ).get("is_encoder_decoder")
]  # fmt: skip


@pytest.mark.parametrize("folder", marked(HAVE_CLASSES))
def test_params_are_the_files_own_tree(folder):
    """And the tree is taken as `params=`, as before."""
    model, params = flax_class(folder).from_pretrained(FOLDERS / folder, _do_init=False)
    own = flatten_dict(tree(folder))
    assert {path: x.shape for path, x in flatten_dict(params).items()} == {
        path: x.shape for path, x in own.items()
    }
    for path, x in flatten_dict(params).items():
        np.testing.assert_array_equal(x, own[path], err_msg=str(path))
    inputs = (
        {"decoder_input_ids": DECODER_IDS}
        if model.config.is_encoder_decoder and not folder.endswith("encoder")
        else {}
    )
    out = model(IDS, MASK, params=tree(folder), **inputs, return_dict=False)[0]
    assert difference(np.asarray(out), OWN[folder]) < 1e-4


@pytest.mark.parametrize("folder", marked(["bart", "mbart", "marian", "pegasus"]))
def test_a_logits_bias_of_either_shape_is_taken(folder):
    model = flax_class(folder).from_pretrained(FOLDERS / folder)
    bias = model.params["final_logits_bias"]
    assert bias.shape == (1, model.config.vocab_size)
    for shape in (bias, bias.T):
        out = model(
            IDS,
            MASK,
            decoder_input_ids=DECODER_IDS,
            params={**model.params, "final_logits_bias": shape},
        )
        assert difference(np.asarray(out.logits), OWN[folder]) < 1e-4
    wrong = {**model.params, "final_logits_bias": bias[:, 1:]}
    with pytest.raises(
        InputError, match=r"final_logits_bias has shape \(1, 30\), expected \(1, 31\)"
    ):
        model(IDS, decoder_input_ids=DECODER_IDS, params=wrong)


@pytest.mark.parametrize("folder", marked(["gpt2", "bloom", "gemma", "bart"]))
def test_a_class_with_a_head_takes_what_one_without_wrote(folder):
    """A file and a tree without the prefix of a tied model."""
    base, cls = f"{folder}_base", flax_class(folder)
    options = {"decoder_input_ids": DECODER_IDS} if "bart" in folder else {}
    loaded = cls.from_pretrained(FOLDERS / base)
    expected = np.asarray(loaded(IDS, MASK, **options).logits)
    model, _ = cls.from_pretrained(FOLDERS / folder, _do_init=False)
    np.testing.assert_array_equal(model(IDS, MASK, params=tree(base), **options).logits, expected)
    assert difference(expected, OWN[folder]) > 0.1
