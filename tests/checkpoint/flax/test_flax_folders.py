"""Folders that transformers 4.57's Flax classes wrote: every family, head and kind of file.

The references are those of data/flax_files/make_cases.py.
"""

from __future__ import annotations

import ast
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from flax_bytes import packed
from paths import DATA

import jaxllm
from jaxllm import flax_classes
from jaxllm.checkpoint.flax_file import FlaxFile
from jaxllm.errors import CheckpointError, InputError
from jaxllm.saving import export_checkpoint

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


def exported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    export_checkpoint(folder, tmp_path / "exported")


def name_of(case: dict[str, Any]) -> str:
    return f"{case['folder']} {' '.join(f'{k}={v}' for k, v in case['config'].items())}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=name_of(case), marks=() if case["folder"] == "opt" else pytest.mark.ci
        )
        for case in OTHER
    ],
)
def test_the_config_counts_where_the_flax_class_ignored_it(tmp_path, case):
    """Loading says so once, and which config gives the Flax class's own results."""
    folder = with_config(case["folder"], tmp_path, **case["config"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = jaxllm.load(folder)
    (message,) = [str(x.message) for x in caught if "Flax class" in str(x.message)]
    assert any(
        f"config.json: transformers' Flax class did not read {name}" in message
        for name in case["config"]
    )
    assert difference(output(model), np.array(case["output"])) < 1e-4
    fields = ast.literal_eval(message.partition("config=")[2].partition("; see")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = jaxllm.load(folder, config=fields)
    assert difference(output(model), np.array(case["flax_output"])) < 1e-4


def test_exported_weights_keep_what_the_config_says(tmp_path):
    folder = with_config("opt", tmp_path, enable_bias=False)
    with pytest.warns(UserWarning, match="did not read enable_bias"):
        exported(folder, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = jaxllm.load(tmp_path / "exported")
    expected = next(x["output"] for x in OTHER if "enable_bias" in x["config"])
    assert difference(output(model), np.array(expected)) < 1e-4


@pytest.mark.parametrize(
    ("folder", "fields", "message"),
    [
        ("llama", {"mlp_bias": True}, "missing .*mlp.*bias"),
        ("llama", {"head_dim": 6}, "has shape .* config.json implies"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "missing.*decoder.embed_tokens"),
    ],
)
def test_a_config_that_the_file_cannot_follow(tmp_path, folder, fields, message):
    folder = with_config(folder, tmp_path, **fields)
    (name,) = fields
    with (
        pytest.warns(UserWarning, match=f"did not read {name} .* config={{'{name}': "),
        pytest.raises(CheckpointError, match=message),
    ):
        jaxllm.load(folder)


@pytest.mark.parametrize("folder", ["mt5", "mt5_untied"])
def test_the_head_of_a_tied_mt5_is_scaled_whatever_version_saved_the_config(tmp_path, folder):
    copy = with_config(folder, tmp_path, transformers_version="5.24.0")
    model, _ = jaxllm.load(copy)
    assert difference(output(model), OWN[folder]) < 1e-4
    jaxllm.save_hf(tmp_path / "saved", model)
    exported(copy, tmp_path)
    for name in ("saved", "exported"):
        model, _ = jaxllm.load(tmp_path / name)
        assert difference(output(model), OWN[folder]) < 1e-4


def test_a_copy_as_safetensors_is_scaled_as_its_version_says(tmp_path):
    """The other kind of file of the same weights."""
    copy = with_config("mt5", tmp_path, transformers_version="4.57.6")
    jaxllm.save_hf(tmp_path / "saved", jaxllm.load(copy)[0])
    path = tmp_path / "saved" / "config.json"
    config = json.loads(path.read_text())
    config.pop("scale_decoder_outputs", None)
    path.write_text(json.dumps({**config, "transformers_version": "5.24.0"}))
    assert difference(output(jaxllm.load(tmp_path / "saved")[0]), OWN["mt5"]) > 0.1


@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_of_several_devices(tmp_path, stage):
    """Those of `flax.jax_utils.replicate`, saved without `unreplicate`."""
    folder = with_config(("t5", "gpt2")[stage], tmp_path)
    with FlaxFile(folder / "flax_model.msgpack") as file:
        arrays = {tuple(n.split("/")): np.stack([file.read(n)] * 8) for n in file.names()}
    (folder / "flax_model.msgpack").write_bytes(packed(unflatten_dict(arrays)))
    with pytest.raises(CheckpointError, match=r"has shape \[8, .*saved once for each of 8 devices"):
        jaxllm.load(folder)


@pytest.mark.ci
@pytest.mark.parametrize("folder", ["t5", "gpt2", "gpt2_chunks", "bloom"])
def test_quantized_as_the_same_weights_in_safetensors(tmp_path, folder):
    exported(FOLDERS / folder, tmp_path)
    models = [
        jaxllm.load(path, quantize="int8")[0] for path in (FOLDERS / folder, tmp_path / "exported")
    ]
    first, second = (jax.tree.leaves(model) for model in models)
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)
