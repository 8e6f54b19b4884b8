"""Hugging Face -> Orbax -> Hugging Face: the same files, for every family and dtype."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from parity_data import ROOT, cases
from paths import DATA

import jaxllm
from jaxllm.checkpoint.orbax.model import origin_of
from jaxllm.common.errors import CheckpointError, InputError, MissingFileError, UnsupportedError
from jaxllm.models.build_options import Options
from jaxllm.models.lora import add_lora
from jaxllm.models.model import Origin
from jaxllm.models.weights import parameters

# One for each class and each way to tie, scale and name; the others are slow by their number.
FEW = [
    "gpt2_base",
    "gpt2_hub_layout",
    "gpt2_cls_single",
    "t5_encoder",
    "llama_bias",
    "llama_base_keys",
    "llama_cls_multi",
    "mt5",
    "t5_relu",
    "t5_v11",
    "umt5_tied",
]
ALL = [name for name in cases() if name != "tables"]
REST = [pytest.param(n, marks=pytest.mark.slow) for n in ALL if n not in FEW]
TOKENIZED = DATA / "conformance" / "models" / "s_llama_tok"


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def check_round_trip(source: Path, work: Path, **options) -> None:
    """`load` and `save_hf` give the same bytes as with `save_orbax` and `load_orbax` between."""
    model, tokenizer = jaxllm.load(source, **options)
    jaxllm.save_hf(work / "direct", model, tokenizer)
    jaxllm.save_orbax(work / "orbax", model, tokenizer)
    again, its_tokenizer = jaxllm.load_orbax(work / "orbax", **options)
    assert type(again) is type(model)
    assert again.config == model.config
    assert again.card.origin == model.card.origin
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for path, x in parameters(model).items():
        actual = parameters(again)[path]
        assert actual.dtype == x.dtype
        assert np.asarray(actual).tobytes() == np.asarray(x).tobytes(), path
    jaxllm.save_hf(work / "through", again, its_tokenizer)
    assert files(work / "through") == files(work / "direct")


@pytest.mark.by_default("llama_base_keys")
@pytest.mark.parametrize("name", [*FEW, *REST])
def test_round_trip(name, tmp_path):
    check_round_trip(ROOT / name, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt2_hub_layout", "llama_base_keys", "t5_relu", "mt5"])
def test_round_trip_of_bfloat16(name, tmp_path):
    jaxllm.save_hf(tmp_path / "half", jaxllm.load(ROOT / name)[0], dtype="bfloat16")
    check_round_trip(tmp_path / "half", tmp_path / "widened")
    check_round_trip(tmp_path / "half", tmp_path / "kept", dtype="bfloat16")


@pytest.mark.ci
def test_tokenizer_and_generation_config_are_saved(tmp_path):
    check_round_trip(TOKENIZED, tmp_path)
    model, tokenizer = jaxllm.load(TOKENIZED)
    again, its_tokenizer = jaxllm.load_orbax(tmp_path / "orbax")
    assert again.generation_config == model.generation_config
    assert again.card.tokenizer_eos == model.card.tokenizer_eos
    assert tokenizer is not None
    assert its_tokenizer is not None
    assert its_tokenizer.encode("to be") == tokenizer.encode("to be")


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_model_without_checkpoint(family, tmp_path):
    model = tiny.make(family, options=Options(param_dtype=jnp.bfloat16))
    jaxllm.save_orbax(tmp_path, model)
    again, tokenizer = jaxllm.load_orbax(tmp_path)
    assert tokenizer is None
    assert again.config == model.config
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for path, x in parameters(model).items():
        np.testing.assert_array_equal(parameters(again)[path], x)


def test_an_origin_as_json_and_back():
    origin = Origin("{}", dtypes=(("a", "F32"),), copies=(("b", "c"),), quantized=True)
    assert origin_of(json.loads(json.dumps(dataclasses.asdict(origin)))) == origin


@pytest.mark.ci
def test_saving_again_replaces_the_model(tmp_path):
    for seed in (0, 1):
        jaxllm.save_orbax(tmp_path, tiny.make("gpt2", seed=seed))
    again, _ = jaxllm.load_orbax(tmp_path)
    expected = tiny.make("gpt2", seed=1)
    np.testing.assert_array_equal(again.backbone.embed.weight, expected.backbone.embed.weight)
    assert [p.name for p in (tmp_path / "weights").iterdir() if p.is_dir()] == ["1"]


@pytest.mark.ci
def test_the_files_of_a_replaced_model(tmp_path):
    """Its generation settings go, its tokenizer stays with a warning; no model, no change."""
    model, tokenizer = jaxllm.load(TOKENIZED)
    jaxllm.save_orbax(tmp_path, model, tokenizer)
    with pytest.raises(InputError, match="save_orbax: the model has LoRA"):
        jaxllm.save_orbax(tmp_path, add_lora(model), tokenizer)
    again, _ = jaxllm.load_orbax(tmp_path)
    assert again.generation_config is not None
    model.generation_config = None
    with pytest.warns(UserWarning, match="keeps the tokenizer"):
        jaxllm.save_orbax(tmp_path, model)
    again, kept = jaxllm.load_orbax(tmp_path)
    assert again.generation_config is None
    assert kept is not None


@pytest.mark.ci
def test_errors(tmp_path):
    with pytest.raises(MissingFileError, match="no checkpoint"):
        jaxllm.load_orbax(tmp_path)
    jaxllm.save_orbax(tmp_path, tiny.make("llama"))
    with pytest.raises(UnsupportedError, match="dtype: expected float32"):
        jaxllm.load_orbax(tmp_path, dtype="int8")
    data = max((tmp_path / "weights").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="no checkpoint can be restored: step 0"):
        jaxllm.load_orbax(tmp_path)
