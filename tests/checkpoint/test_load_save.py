"""load and save_hf: round trips, dtypes, shards; models without a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from parity_data import ROOT, cases
from paths import DATA
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.checkpoint.weight_files import open_weights
from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    NonFiniteError,
    TokenizerError,
    UnsupportedError,
)
from jaxllm.models.build_options import Options
from jaxllm.models.decoder_only import DecoderOnlyModel
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weights import parameters
from jaxllm.tokenizers import load_tokenizer

MODELS = [name for name in cases() if name != "tables"]


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint: dtype, shape, bytes."""
    with open_weights(folder) as source:
        arrays = {name: source.read(name) for name in source.names()}
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in arrays.items()}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def is_buffer(name: str) -> bool:
    return name.endswith(
        (
            ".attn.bias",
            ".attn.attention.bias",
            ".masked_bias",
            ".inv_freq",
            "EncDecAttention.relative_attention_bias.weight",
        )
    )


def check_round_trip(folder: Path, saved: Path, **options) -> None:
    model, tokenizer = jaxllm.load(folder, **options)
    jaxllm.save_hf(saved, model, tokenizer)
    expected = tensors_of(folder)
    assert tensors_of(saved) == {k: v for k, v in expected.items() if not is_buffer(k)}
    assert config_of(saved) == config_of(folder)


@pytest.mark.in_ci(
    "gpt2_cls_regression",
    "gpt2_cross",
    "mt5",
    "qwen2_window",
    "t5_default_buckets",
    "t5_far",
    "t5_flan_resaved",
    "t5_gated_silu",
    "t5_gelu",
    "t5_head_mask",
    "t5_relu",
    "t5_tied_unscaled",
    "t5_v11",
    "umt5",
    "umt5_tied",
)
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tmp_path):
    check_round_trip(ROOT / name, tmp_path)


@pytest.mark.by_default("llama_base_keys-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2_hub_layout", "llama_base_keys", "t5_relu", "mt5"])
def test_round_trip_of_half_precision(name, dtype, tmp_path):
    """On a CPU the weights are widened to float32; saving gives the file's bytes all the same."""
    half = tmp_path / "half"
    model, _ = jaxllm.load(ROOT / name)
    jaxllm.save_hf(half, model, dtype=dtype)
    assert {d for d, _, _ in tensors_of(half).values()} == {dtype}
    assert config_of(half) == config_of(ROOT / name) | {"torch_dtype": dtype}
    check_round_trip(half, tmp_path / "widened")
    check_round_trip(half, tmp_path / "kept", dtype=dtype)
    widened = {x.dtype for x in parameters(jaxllm.load(half)[0]).values()}
    kept = {path: x.dtype for path, x in parameters(jaxllm.load(half, dtype=dtype)[0]).items()}
    assert widened == {jnp.dtype(jnp.float32)}
    for path, actual in kept.items():  # T5's wo alone is float32, for float16, which it overflows
        wide = dtype == "float16" and "t5" in name and path.endswith("mlp.down.weight")
        assert actual == ("float32" if wide else dtype), path


def test_generation_fields_of_an_old_config_are_defaults(tmp_path):
    source = DATA / "conformance" / "models" / "s_llama"
    raw = json.loads((source / "config.json").read_text()) | {"max_length": 33, "num_beams": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(source / "model.safetensors", tmp_path)
    settings = jaxllm.load(tmp_path)[0].generation_config
    assert (settings.max_length, settings.num_beams) == (33, 2)


def test_generation_config_and_tokenizer_are_saved(tmp_path):
    folder = DATA / "conformance" / "models" / "s_llama_tok"
    check_round_trip(folder, tmp_path)
    for name in ("generation_config.json", "tokenizer.json"):
        saved = json.loads((tmp_path / name).read_text())
        assert saved == json.loads((folder / name).read_text())


def test_saving_over_the_loaded_files(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "sharded" / "f32", folder)
    before = tensors_of(folder)
    model, _ = jaxllm.load(folder)
    with pytest.raises(CheckpointError, match=r"there is a model already \(config\.json, model-"):
        jaxllm.save_hf(folder, model)
    assert tensors_of(folder) == before
    jaxllm.save_hf(folder, model, overwrite=True)
    assert tensors_of(folder) == before
    assert [p.name for p in folder.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin"])
def test_weights_of_another_format_are_a_model_too(tmp_path, name):
    (tmp_path / name).write_bytes(b"weights")
    model, _ = jaxllm.load(ROOT / "gpt2_base")
    with pytest.raises(CheckpointError, match=f"there is a model already .{name}"):
        jaxllm.save_hf(tmp_path, model)


def test_the_tokenizer_of_a_replaced_model_stays_with_a_warning(tmp_path):
    model, _ = jaxllm.load(ROOT / "gpt2_base")
    jaxllm.save_hf(tmp_path, model)
    (tmp_path / "tokenizer.json").write_bytes(b"of an earlier model")
    with pytest.warns(UserWarning, match=r"keeps the tokenizer .* \(tokenizer\.json\)"):
        jaxllm.save_hf(tmp_path, model, overwrite=True)
    assert (tmp_path / "tokenizer.json").read_bytes() == b"of an earlier model"


def test_generation_settings_of_a_replaced_model_go(tmp_path):
    model, _ = jaxllm.load(ROOT / "gpt2_base")
    settings = tmp_path / "generation_config.json"
    settings.write_text('{"max_new_tokens": 3}')  # beside no model: written before it
    model.generation_config = None
    jaxllm.save_hf(tmp_path, model)
    assert settings.exists()
    jaxllm.save_hf(tmp_path, model, overwrite=True)
    assert not settings.exists()


def test_shards(tmp_path):
    model, _ = jaxllm.load(ROOT / "gpt2_base")
    jaxllm.save_hf(tmp_path, model, max_shard_bytes=8000)
    shards = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert tensors_of(tmp_path) == tensors_of(ROOT / "gpt2_base")


@pytest.mark.ci
def test_trained_weights_stay_float32(tmp_path):
    model, _ = jaxllm.load(ROOT / "sharded" / "bf16")
    trained = jax.tree.map(lambda x: x * 1.001, model).with_card(model.card)
    jaxllm.save_hf(tmp_path, trained)
    assert {d for d, _, _ in tensors_of(tmp_path).values()} == {"float32"}
    assert config_of(tmp_path)["dtype"] == "float32"
    again, _ = jaxllm.load(tmp_path)
    for path, x in parameters(trained).items():
        np.testing.assert_array_equal(parameters(again)[path], x)


def test_overridden_config_is_saved(tmp_path):
    """A folder that was loaded past an unknown field loads without help once it is saved."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "gpt2_base", folder)
    raw = config_of(folder) | {"logit_scale": 2.0}
    del raw["model_type"], raw["architectures"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"model_type: .*config=\{"):
        jaxllm.load(folder)
    with pytest.raises(UnsupportedError, match=r"logit_scale \(2\.0\)"):
        jaxllm.load(folder, config={"model_type": "gpt2"})
    past = {"model_type": "gpt2", "logit_scale": None, "attn_pdrop": 0.25}
    model, _ = jaxllm.load(folder, config=past)
    jaxllm.save_hf(tmp_path / "saved", model)
    again, _ = jaxllm.load(tmp_path / "saved")
    assert again.config == model.config
    assert again.config.attn_pdrop == 0.25


def test_token_ids_outside_the_vocabulary(tmp_path):
    """Ids of a larger vocabulary, left in both files, are named and count as unset."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "gpt2_base", folder)
    ids = {"bos_token_id": 50256, "eos_token_id": [4, 50256], "pad_token_id": 50257}
    (folder / "config.json").write_text(json.dumps(config_of(folder) | ids))
    for files in ({}, {"generation_config.json": ids}):
        for name, fields in files.items():
            (folder / name).write_text(json.dumps(fields))
        named = r"bos_token_id 50256 \(config.json\), eos_token_id 50256 \(config.json\), pad_tok"
        with pytest.warns(UserWarning, match=rf"not in the vocabulary of 51 .*: {named}"):
            model, _ = jaxllm.load(folder)
        assert model.config.eos_token_ids == (4,)
        assert dict(model.generation_config.to_dict()) == {"eos_token_id": (4,)}
        jaxllm.generate(model, [[5]], max_new_tokens=2)  # the end token that is left is enough


def test_generation_without_an_end_token_that_is_left_says_so(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "gpt2_base", folder)
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"eos_token_id": 50256}))
    with pytest.warns(UserWarning, match=r"eos_token_id 50256 \(config.json\)$"):
        model, _ = jaxllm.load(folder)
    assert model.config.eos_token_ids == ()
    with pytest.warns(UserWarning, match="no end token: 50256, which the model's files name"):
        jaxllm.generate(model, [[5]], max_new_tokens=2)
    with pytest.warns(UserWarning, match="no end token: 50256"):
        jaxllm.BatchGenerator(model, None, max_new_tokens=2).generate([{"input_ids": [5]}])
    jaxllm.generate(model, [[5]], max_new_tokens=2, eos_token_id=None)


def test_changed_config_field_is_saved(tmp_path):
    model, _ = jaxllm.load(ROOT / "llama_bias")
    model.config = dataclasses.replace(model.config, pad_token_id=3)
    jaxllm.save_hf(tmp_path, model)
    assert config_of(tmp_path) == config_of(ROOT / "llama_bias") | {"pad_token_id": 3}


OWN = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}},
    "llama llama3": {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt2": {},
    "gpt2 cross": {"add_cross_attention": True, "tie_word_embeddings": False, "n_inner": 40},
    "t5": {},
    "t5 tied": {"tie_word_embeddings": True, "feed_forward_proj": "relu"},
    "t5 umt5": {"model_type": "umt5", "num_decoder_layers": 1},
}


@pytest.mark.by_default("llama llama3")
@pytest.mark.parametrize("name", OWN)
def test_model_without_checkpoint(name, tmp_path):
    model = tiny.make(name.split()[0], **OWN[name])
    jaxllm.save_hf(tmp_path, model)
    again, tokenizer = jaxllm.load(tmp_path)
    assert tokenizer is None
    assert type(again) is type(model)
    assert again.config == model.config
    ours, theirs = parameters(model), parameters(again)
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        np.testing.assert_array_equal(theirs[path], x)
    assert config_of(tmp_path)["torch_dtype"] == "float32"


@pytest.mark.parametrize("listed", ["GemmaModel", "GemmaForCausalLM"])
def test_the_class_that_config_json_names_decides(listed, tmp_path):
    """Its tied head would make a language model of either; a caller gets what they name."""
    shutil.copytree(ROOT / "gemma_published", tmp_path / "model")
    raw = config_of(tmp_path / "model") | {"architectures": [listed]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    assert type(jaxllm.load(tmp_path / "model")[0]).__name__ == listed
    for named in ("GemmaModel", "GemmaForCausalLM"):
        model, _ = jaxllm.load(tmp_path / "model", architecture=named)
        assert type(model).__name__ == named
        jaxllm.save_hf(tmp_path / named, model)
        assert config_of(tmp_path / named)["architectures"] == [named]


HEADLESS = {
    name: list(family.classes)[-1]
    for name, family in FAMILIES.items()
    if issubclass(list(family.classes.values())[-1], DecoderOnlyModel)
}
"""Each decoder-only family -> its class without a head. The encoder of T5 has a test below."""


@pytest.mark.parametrize("family", HEADLESS)
def test_a_file_without_a_head(family, tmp_path):
    """An embedding model: config.json names the class without a head, and the head is absent."""
    name = HEADLESS[family]
    full = tiny.make(family, tie_word_embeddings=False)
    jaxllm.save_hf(tmp_path / "model", full)
    file = tmp_path / "model" / "model.safetensors"
    save_file({k: x for k, x in load_file(file).items() if not k.startswith("lm_head")}, file)
    raw = config_of(tmp_path / "model") | {"architectures": [name]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    model, _ = jaxllm.load(tmp_path / "model")
    assert type(model).__name__ == name
    tokens = tiny.ids(2, 5)
    hidden = full(tokens, output_hidden_states=True).hidden_states[-1]
    np.testing.assert_allclose(model(tokens).last_hidden_state, hidden, rtol=0, atol=1e-6)
    check_round_trip(tmp_path / "model", tmp_path / "saved")
    for act in (jaxllm.generate, jaxllm.BatchGenerator):
        with pytest.raises(UnsupportedError, match=rf"{name} has no language-model head; it makes"):
            act(*((model, tokens) if act is jaxllm.generate else (model,)))
    with pytest.raises(AttributeError, match=r"'generate': this class has no language-model head"):
        model.generate(tokens)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("llama", "LlamaForSequenceClassification"),
        ("gpt2", "GPT2ForSequenceClassification"),
        ("t5", "T5EncoderModel"),
    ],
)
def test_other_heads_without_checkpoint(family, architecture, tmp_path):
    model = tiny.make(family, architecture=architecture, num_labels=3)
    jaxllm.save_hf(tmp_path, model)
    assert config_of(tmp_path)["architectures"] == [architecture]
    again, _ = jaxllm.load(tmp_path)
    assert type(again) is type(model)
    assert again.config == model.config


@pytest.mark.ci
def test_encoder_of_a_t5_checkpoint(tmp_path):
    full, _ = jaxllm.load(ROOT / "t5_v11")
    encoder, _ = jaxllm.load(ROOT / "t5_v11", architecture="T5EncoderModel")
    tokens = tiny.ids(vocab=40)
    out = full(tokens, decoder_input_ids=tokens)
    np.testing.assert_allclose(
        encoder(tokens).last_hidden_state, out.encoder_last_hidden_state, atol=1e-6
    )
    jaxllm.save_hf(tmp_path, encoder)
    saved = tensors_of(tmp_path)
    assert not [name for name in saved if name.startswith(("decoder.", "lm_head."))]
    assert config_of(tmp_path)["architectures"] == ["T5EncoderModel"]
    again, _ = jaxllm.load(tmp_path)
    np.testing.assert_array_equal(
        again(tokens).last_hidden_state, encoder(tokens).last_hidden_state
    )


@pytest.mark.ci
@pytest.mark.parametrize("name", ["llama_bias", "gpt2_base", "t5_v11"])
def test_requested_dtypes(name):
    """bf16 computing over float32 weights, and bf16 weights; logits are float32 always."""
    tokens = tiny.ids(vocab=40)
    exact = tiny.logits(jaxllm.load(ROOT / name)[0], tokens)
    for options in ({"dtype": "bfloat16"}, {"dtype": jnp.bfloat16, "param_dtype": "bfloat16"}):
        model, _ = jaxllm.load(ROOT / name, **options)
        kept = {str(x.dtype) for path, x in parameters(model).items() if "mlp.down" not in path}
        assert kept == {options.get("param_dtype", "float32")}
        logits = tiny.logits(model, tokens)
        assert logits.dtype == np.float32
        distance = np.abs(logits - exact).max() / exact.std()
        assert 1e-4 < distance < 0.2


@pytest.mark.by_default("float16-layers1")
@pytest.mark.parametrize(("dtype", "layers"), [("bfloat16", ()), ("float16", ("mlp.down",))])
def test_t5_feed_forward_output_is_float32_in_float16(dtype, layers):
    """As in transformers: bfloat16 has the range of float32."""
    model, _ = jaxllm.load(ROOT / "t5_v11", dtype=dtype, param_dtype=dtype)
    actual = {p: str(x.dtype) for p, x in parameters(model).items()}
    wide = {p for p, d in actual.items() if d == "float32"}
    assert wide == {p for p in actual for layer in layers if p.endswith(f"{layer}.weight")}
    expected = jnp.dtype("float32" if layers else dtype)
    assert model.encoder.blocks[0].mlp.down.dtype == expected
    hidden = jnp.ones((1, 1, model.config.d_ff), dtype)
    assert model.encoder.blocks[0].mlp.down(hidden).dtype == expected


def test_weights_too_large_for_float16(tmp_path):
    model = tiny.make("llama")
    model.backbone.embed.weight[...] = model.backbone.embed.weight[...].at[0, 0].set(1e5)
    with pytest.raises(NonFiniteError, match=r"embed_tokens.* 100000, which float16 cannot"):
        jaxllm.save_hf(tmp_path, model, dtype="float16")
    jaxllm.save_hf(tmp_path, model)
    with pytest.raises(NonFiniteError, match=r"embed_tokens.* 100000, which float16 cannot"):
        jaxllm.load(tmp_path, param_dtype="float16")
    assert jaxllm.load(tmp_path, param_dtype="bfloat16")


def test_progress_counts_bytes():
    seen = []
    jaxllm.load(ROOT / "gpt2_base", progress=lambda *report: seen.append(report))
    names, done, total = zip(*seen, strict=True)
    assert set(names) == {n for n in tensors_of(ROOT / "gpt2_base") if not is_buffer(n)}
    assert list(done) == sorted(done)
    assert set(total) == {done[-1]}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float64"}, UnsupportedError, "dtype: expected float32"),
        ({"param_dtype": "int8"}, UnsupportedError, "param_dtype: expected float32"),
        ({"dtype": "half-ish"}, UnsupportedError, "'half-ish'"),
        ({"attn_implementation": "flash"}, UnsupportedError, "attn_implementation: unknown"),
        ({"architecture": "LlamaForTokenClassification"}, UnsupportedError, "architectures"),
        ({"revision": "v1"}, InputError, "revision='v1'"),
        ({"mesh": object()}, InputError, "mesh: expected what jaxllm.make_mesh returns"),
    ],
)
def test_unknown_options(options, error, message):
    with pytest.raises(error, match=message):
        jaxllm.load(ROOT / "llama_bias", **options)


def test_saving_to_a_file_path_is_an_error(tmp_path):
    (tmp_path / "here").write_text("")
    with pytest.raises(CheckpointError, match="not a folder"):
        jaxllm.save_hf(tmp_path / "here", tiny.make("llama"))
    with pytest.raises(CheckpointError, match="cannot be created"):
        jaxllm.save_hf(tmp_path / "here" / "below", tiny.make("llama"))
    tokenizer = load_tokenizer(ROOT.parent / "conformance" / "models" / "s_llama_tok")
    with pytest.raises(TokenizerError, match="cannot be created"):
        tokenizer.save(tmp_path / "here")
    (tmp_path / "there" / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be written"):
        tokenizer.save(tmp_path / "there")


@pytest.mark.by_default("bfloat16-wide0")
@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", ()), ("float16", ("wo",))])
def test_half_precision_model_without_checkpoint(tmp_path, dtype, wide):
    options = Options(dtype=dtype, param_dtype=dtype)
    jaxllm.save_hf(tmp_path, tiny.make("t5", options=options))
    assert config_of(tmp_path)["torch_dtype"] == dtype
    actual = {name: dtype for name, (dtype, _, _) in tensors_of(tmp_path).items()}
    assert {n for n, d in actual.items() if d == "float32"} == {
        n for n in actual if n.split(".")[-2] in wide
    }


def resaved(folder: Path, model, changed: dict[str, np.ndarray]) -> None:
    """Saves a model with other values of some tensors, or with more tensors."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | changed, path, {"format": "pt"})


def test_shapes_are_checked_before_copies_are_compared(tmp_path):
    shared = np.ones((60, 32), np.float32)  # 50 rows in the config
    copy = {"encoder.embed_tokens.weight": 2 * shared}
    resaved(tmp_path, tiny.make("t5"), {"shared.weight": shared, **copy})
    with pytest.raises(CheckpointError, match=r"shared\.weight .*\[60, 32\]"):
        jaxllm.load(tmp_path)


def test_few_rows_of_a_constant_are_made_for_a_tensor_without_values(tmp_path):
    empty = np.zeros((2**40, 0), np.float32)  # as many positions would take 128 TB
    resaved(tmp_path, tiny.make("xglm"), {"model.embed_positions.weights": empty})
    with pytest.raises(CheckpointError, match="other values than the sinusoidal positions"):
        jaxllm.load(tmp_path)
