"""Loading incomplete, contradictory or malicious folders: named errors, no code executed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny
from parity_data import ROOT, load_case
from parity_runs import distances, forward

import jaxllm
from jaxllm.checkpoint.safetensors import write_safetensors
from jaxllm.checkpoint.weight_files import open_weights
from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    MissingFileError,
    NonFiniteError,
    UnsupportedError,
)


@pytest.fixture
def copy(tmp_path):
    """Makes a copy of a parity model with changed tensors (None removes one) and config fields."""

    def make(name: str, tensors: dict | None = None, config: dict | None = None) -> Path:
        folder = tmp_path / name
        shutil.copytree(ROOT / name, folder)
        with open_weights(folder) as source:
            arrays = {n: np.array(source.read(n)) for n in source.names()}
        arrays |= tensors or {}
        write_safetensors(
            folder / "model.safetensors", {n: x for n, x in arrays.items() if x is not None}
        )
        raw = json.loads((folder / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return make


def tensor(name: str, of: str) -> np.ndarray:
    with open_weights(ROOT / of) as source:
        return np.array(source.read(name))


def test_missing_and_unexpected_tensors_are_listed_in_500_characters(copy):
    folder = copy("gpt2_base")
    with open_weights(folder) as source:
        arrays = {f"renamed.{n}": np.array(source.read(n)) for n in source.names()}
    write_safetensors(folder / "model.safetensors", arrays)
    with pytest.raises(CheckpointError) as caught:
        jaxllm.load(folder)
    assert len(str(caught.value)) <= 500
    missing, unexpected = str(caught.value).split("missing ")[1].split("; unexpected ")
    for part in (missing, unexpected):
        names = part.rsplit(" and ", 1)[0].split(", ")
        assert len(names) >= 2
        assert part.endswith(f" and {len(arrays) - len(names)} more")


def test_one_missing_tensor(copy):
    folder = copy("llama_bias", {"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"; missing model\.norm\.weight$"):
        jaxllm.load(folder)


def test_fields_of_two_configs_are_named(copy):
    fields = r"\(encoder.num_hidden_layers \d, encoder.attention_bias \w+, decoder.num"
    with pytest.raises(CheckpointError, match=rf"{fields}[^(]*\); missing model\.encoder\.norm"):
        jaxllm.load(copy("t5gemma_published", {"model.encoder.norm.weight": None}))


def test_one_unexpected_tensor(copy):
    folder = copy("llama_bias", {"model.layers.0.self_attn.q_norm.weight": np.ones(6, np.float32)})
    with pytest.raises(CheckpointError, match=r"; unexpected model.*q_norm\.weight$"):
        jaxllm.load(folder)


def test_wrong_shapes(copy):
    weight = tensor("model.layers.0.mlp.up_proj.weight", "llama_bias")
    folder = copy("llama_bias", {"model.layers.0.mlp.up_proj.weight": weight.T.copy()})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape .* \(from hidden_size"):
        jaxllm.load(folder)
    fused = tensor("transformer.h.0.attn.c_attn.weight", "gpt2_base")
    folder = copy("gpt2_base", {"transformer.h.0.attn.c_attn.weight": fused.T.copy()})
    with pytest.raises(CheckpointError, match=r"c_attn\.weight has shape"):
        jaxllm.load(folder)


@pytest.mark.parametrize("dtype", [np.int8, np.float64])
def test_weights_of_other_dtypes(copy, dtype):
    norm = tensor("model.norm.weight", "llama_bias").astype(dtype)
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight"):
        jaxllm.load(copy("llama_bias", {"model.norm.weight": norm}))


@pytest.mark.by_default("float32-nan")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nonfinite_weights(copy, value, dtype):
    norm = tensor("model.norm.weight", "llama_bias").astype(dtype)
    norm[3] = value
    folder = copy("llama_bias", {"model.norm.weight": norm})
    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight: 1 of .*allow_nonfinite"):
        jaxllm.load(folder)
    model, _ = jaxllm.load(folder, allow_nonfinite=True)
    np.testing.assert_equal(np.asarray(model.backbone.stack.norm.weight[...])[3], value)


@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "1 of [0-9]+ values are NaN"), (1e6, "holds 1e.06, which")]
)
def test_weights_of_an_expert_out_of_range(copy, value, message):
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    weight = tensor(name, "mixtral_window")
    weight[3, 1] = value
    with pytest.raises(NonFiniteError, match=rf"safetensors: {re.escape(name)}: {message}"):
        jaxllm.load(copy("mixtral_window", {name: weight}), param_dtype="float16")


def test_float16_and_bfloat16_in_one_file(copy):
    norm = tensor("model.norm.weight", "sharded/bf16").astype(np.float16)
    folder = copy("sharded/bf16", {"model.norm.weight": norm})
    for options in ({}, {"dtype": "bfloat16"}, {"param_dtype": "bfloat16"}):
        assert jaxllm.load(folder, **options)


def test_pickles_are_never_opened(copy):
    folder = copy("llama_bias")
    for name in ("optimizer.pt", "model.pt", "consolidated.00.pth", "training_args.bin"):
        os.mkfifo(folder / name)  # opening it would wait for a writer
    jaxllm.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="safetensors"):
        jaxllm.load(folder)
    for name in ("optimizer.pt", "training_args.bin"):
        (folder / name).unlink()
        (folder / name).write_bytes(b"")
        with pytest.raises(UnsupportedError, match="is not a weight file that jaxllm opens"):
            jaxllm.load(folder / name)


LONG_NAME = "x" * 250 + ".safetensors"


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", LONG_NAME]
)
def test_index_outside_the_folder(copy, shard):
    folder = copy("llama_bias")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="plain name"):
        jaxllm.load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected an object"),
        ("{", "not JSON"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "twice"),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "not finite"),
        ('{"model_type": "llama", "rms_norm_eps": 1e999}', "not finite"),
        ("{" * 100, "not JSON"),
        ('{"a":' * 100 + "1" + "}" * 100, "deeper than"),
    ],
)
def test_malformed_config(copy, text, message):
    folder = copy("llama_bias")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        jaxllm.load(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_missing_files(copy, tmp_path):
    folder = copy("llama_bias")
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedError, match=r"folder that also holds config\.json"):
        jaxllm.load(folder / "model.safetensors")
    with pytest.raises(MissingFileError, match=r"config\.json"):
        jaxllm.load(folder)
    with pytest.raises(MissingFileError):
        jaxllm.load(tmp_path / "nowhere")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(MissingFileError, match=r"several \.gguf files \(a\.gguf, b\.gguf\)"):
        jaxllm.load(tmp_path)


@pytest.mark.ci
def test_differing_head_of_tied_config_is_used(copy):
    """Same as transformers 5; version 4 ties it over."""
    head = np.array(tensor("lm_head.weight", "gpt2_unscaled"))
    head[0] += 1.0
    folder = copy("gpt2_unscaled", {"lm_head.weight": head})
    model, _ = jaxllm.load(folder)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.lm_head.weight[...], head)
    tied, _ = jaxllm.load(ROOT / "gpt2_unscaled")
    assert tied.lm_head is None
    tokens = tiny.ids(vocab=20)
    changed = np.abs(tiny.logits(model, tokens) - tiny.logits(tied, tokens)).max(axis=(0, 1))
    assert (changed > 1e-3).nonzero()[0].tolist() == [0]


def test_tying_compares_bits(copy):
    """A head that equals the embedding but for the sign of a zero comes back with its own bytes."""
    head = np.array(tensor("transformer.wte.weight", "gpt2_unscaled"))
    head[0, 0] = 0.0
    other = head.copy()
    other[0, 0] = -0.0
    folder = copy("gpt2_unscaled", {"transformer.wte.weight": head, "lm_head.weight": other})
    jaxllm.save_hf(folder.parent / "saved", jaxllm.load(folder)[0])
    with open_weights(folder.parent / "saved") as saved:
        assert saved.read("lm_head.weight").tobytes() == other.tobytes()


@pytest.mark.ci
def test_unscaled_mt5_head_saved_by_transformers_5(copy):
    """The file has tie_word_embeddings true, and no other key, beside mT5's own unscaled head."""
    folder = copy("mt5", config={"tie_word_embeddings": True})
    model, _ = jaxllm.load(folder)
    case = load_case("mt5")
    actual = distances(case.calls["plain"], forward(model, case.calls["plain"]), 1.0)
    assert max(actual.values()) < 2e-4


def test_copies_must_be_equal(copy):
    name = "encoder.embed_tokens.weight"
    with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens\.weight is a copy of shared"):
        jaxllm.load(copy("t5_relu", {name: tensor(name, "t5_relu") + 1}))


@pytest.mark.by_default("gemma", "mbart decoder")
@pytest.mark.parametrize(
    ("case", "name", "stored"),
    [
        ("gemma_published", "model.embed_tokens.weight", "lm_head.weight"),
        ("mbart_full", "model.shared.weight", "model.decoder.embed_tokens.weight"),
        ("mbart_full", "model.shared.weight", "lm_head.weight"),
        ("t5_relu", "shared.weight", "lm_head.weight"),
        ("t5gemma_published", "model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"),
    ],
    ids=["gemma", "mbart decoder", "mbart head", "t5", "t5gemma"],
)
def test_a_tied_matrix_may_have_the_name_of_any_of_its_copies(copy, case, name, stored):
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # of T5
    dropped = {name: None} | (dict.fromkeys(copies) if case.startswith("t5_") else {})
    matrix = tensor(name, case).astype(ml_dtypes.bfloat16)
    folder = copy(case, dropped | {stored: matrix})
    model, _ = jaxllm.load(folder, param_dtype="float32")
    assert model.lm_head is None
    jaxllm.save_hf(folder.parent / "saved", model)
    with open_weights(folder.parent / "saved") as saved:
        assert stored not in saved.names()
        np.testing.assert_array_equal(saved.read(name), matrix)
        assert saved.info(name).dtype == matrix.dtype


def test_a_head_of_its_own_is_no_embedding(copy):
    folder = copy("gemma_full", {"model.embed_tokens.weight": None})
    with pytest.raises(CheckpointError, match=r"missing model\.embed_tokens\.weight"):
        jaxllm.load(folder)


@pytest.mark.by_default("marian_separate-lm_head.weight")
@pytest.mark.parametrize(
    ("case", "head"),
    [("marian_separate", "lm_head.weight"), ("t5gemma_full", "lm_head.out_proj.weight")],
)
def test_differing_heads_of_families_that_can_untie(copy, case, head):
    model, _ = jaxllm.load(copy(case, config={"tie_word_embeddings": True}))
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.lm_head.weight[...], tensor(head, case))


@pytest.mark.by_default("mbart_full")
@pytest.mark.parametrize("case", ["mbart_full", "marian_full"])
def test_differing_heads_of_families_that_cannot(copy, case):
    head = tensor("model.shared.weight", case) + 1
    message = (
        r"model\.safetensors: .* config\.json \(.*tie_word_embeddings True\): lm_head\.weight is a "
        r"copy of model\.shared\.weight there, but they differ"
    )
    with pytest.raises(CheckpointError, match=message):
        jaxllm.load(copy(case, {"lm_head.weight": head}))


def test_separate_embeddings_that_the_config_calls_shared(copy):
    config = {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True}
    with pytest.raises(CheckpointError, match=r"share_encoder_decoder_embeddings True.*is a copy"):
        jaxllm.load(copy("marian_separate", config=config))


@pytest.mark.ci
def test_missing_head_of_untied_config_is_an_error_except_for_t5(copy):
    folder = copy("llama_base_keys", config={"tie_word_embeddings": False})
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight"):
        jaxllm.load(folder)
    assert jaxllm.load(copy("t5_relu", config={"tie_word_embeddings": False}))[0].lm_head is None
