"""BART and its relatives: positions, constants, generation, and options that raise."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.batch import BatchGenerator
from jaxllm.common.errors import CheckpointError, ConfigError, InputError, UnsupportedError
from jaxllm.flax_classes import FlaxBartForConditionalGeneration
from jaxllm.models.build_options import Options
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.nn.positions import Sinusoids
from jaxllm.training import OptimizerConfig, TrainState, loss_for, make_optimizer, make_train_step

PEGASUS = Path(__file__).parents[1] / "data" / "parity" / "pegasus_full"
DATA = Path(__file__).parents[1] / "data"
FULL = Path(__file__).parents[1] / "data" / "parity" / "bart_full"


def test_inputs_beyond_the_positions():
    model = tiny.cached("bart")
    long = tiny.ids(1, 65)
    with pytest.raises(InputError, match="65 tokens, but this model has 64 positions"):
        model(long, decoder_input_ids=tiny.ids(1, 3))
    with pytest.raises(InputError, match="65 tokens, but this model has 64 positions"):
        model(tiny.ids(1, 3), decoder_input_ids=long)
    with pytest.raises(InputError, match="65 tokens, but this model has 64 positions"):
        model.generate(long, max_new_tokens=2)
    (output,) = BatchGenerator(model).generate([long[0].tolist()])
    assert "the prompt has 65 tokens, but the model's context has 64" in output.error


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        pytest.param({"do_sample": True, "top_k": 9, "key": 3}, marks=pytest.mark.ci),
        pytest.param(
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, marks=pytest.mark.ci
        ),
        pytest.param({"penalty_alpha": 0.4, "top_k": 3}, marks=pytest.mark.ci),
        pytest.param({"prompt_lookup_num_tokens": 2}, marks=pytest.mark.ci),
    ],
)
@pytest.mark.parametrize("family", ["bart", pytest.param("t5gemma", marks=pytest.mark.slow)])
def test_a_row_is_what_it_is_alone(family, settings):
    """Left padding, right padding and none give the same tokens, in every strategy."""
    check_rows(family, settings)


@pytest.mark.parametrize(
    "family", ["m2m_100", *(pytest.param(f, marks=pytest.mark.ci) for f in tiny.BART)]
)
def test_a_row_of_a_relative_is_what_it_is_alone(family):
    check_rows(family, {"num_beams": 3})


def check_rows(family, settings):
    model = tiny.cached(family)
    ids, lengths = tiny.ids(2, 9), (9, 5)
    results = {}
    for side in ("left", "right"):
        mask = np.arange(9)[None] < np.array(lengths)[:, None]
        mask = mask if side == "right" else mask[:, ::-1]
        padded = np.ones_like(ids)
        for row, length in enumerate(lengths):
            padded[row, mask[row]] = ids[row, :length]
        out = model.generate(padded, attention_mask=mask, max_new_tokens=7, **settings)
        results[side] = np.asarray(out.sequences)
    np.testing.assert_array_equal(results["left"], results["right"])
    if "key" not in settings:
        alone = model.generate(ids[1:, :5], max_new_tokens=7, **settings).sequences
        width = alone.shape[1]
        np.testing.assert_array_equal(results["left"][1:, :width], alone)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["bart", pytest.param("t5gemma", marks=pytest.mark.slow)])
def test_rows_of_a_batch_job(family):
    model = tiny.cached(family)
    rows = [tiny.ids(1, length, seed=length)[0].tolist() for length in (3, 12, 7, 30)]
    outputs = BatchGenerator(model, slots=2, max_new_tokens=6, num_beams=2).generate(rows)
    for row, output in zip(rows, outputs, strict=True):
        alone = model.generate(np.array([row]), max_new_tokens=6, num_beams=2).sequences[0, 1:]
        new = list(output.output_ids[0])
        assert new == alone[: len(new)].tolist()


@pytest.mark.ci
@pytest.mark.parametrize("max_time", [None, 1000.0])
def test_an_end_that_is_forced_at_the_limit_is_the_limit(max_time):
    model = tiny.cached("bart")
    rows = [tiny.ids(1, 6, seed=seed)[0].tolist() for seed in range(3)]
    forced = {"forced_eos_token_id": 2, "min_new_tokens": 5, "max_time": max_time}
    outputs = BatchGenerator(model, slots=2, max_new_tokens=5, **forced).generate(rows)
    assert [output.output_ids[0][-1] for output in outputs] == [2, 2, 2]
    assert [output.finish_reasons for output in outputs] == [("length",)] * 3


def test_the_constant_of_the_logits():
    """It acts, is resized with the vocabulary, and is not trained."""
    model = jaxllm.load(FULL)[0]
    ids = {"input_ids": tiny.ids(2, 5, vocab=53), "labels": tiny.ids(2, 4, vocab=53)}
    gradients = parameters(jax.grad(lambda model: model(**ids).loss)(model))
    assert not gradients["final_logits_bias"].any()
    assert gradients["shared.weight"].any()
    larger = model.resize_token_embeddings(60)
    bias = np.asarray(larger.final_logits_bias[...])
    np.testing.assert_array_equal(bias[:, :53], model.final_logits_bias[...])
    assert not bias[:, 53:].any()
    logits = larger(ids["input_ids"], decoder_input_ids=ids["labels"]).logits
    assert logits.shape == (2, 4, 60)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tie_word_embeddings": False}, "tie_word_embeddings: encoder, decoder and head share"),
        ({"normalize_before": True}, "normalize_before"),
        ({"normalize_embedding": False}, "normalize_embedding"),
    ],
)
def test_what_is_not_implemented(changes, why):
    with pytest.raises(UnsupportedError, match=why):
        tiny.make("bart", **changes)


@pytest.mark.parametrize("family", ["bart", *tiny.BART])
def test_extra_rows_of_positions_in_old_files(family):
    """`extra_pos_embeddings` counts rows of a learned table, which sinusoidal positions lack."""
    raw = tiny.CONFIGS[family]
    plain = model_spec(raw).config
    assert model_spec({**raw, "extra_pos_embeddings": 2}).config == plain
    for value in (0, 1, 58100):
        changed = {**raw, "extra_pos_embeddings": value}
        if plain.sinusoids is not None:
            assert model_spec(changed).config == plain
        else:
            with pytest.raises(UnsupportedError, match=r"^extra_pos_embeddings"):
                model_spec(changed)


@pytest.mark.parametrize("family", ["bart", *tiny.BART])
def test_the_order_of_positions_and_norm_in_old_files(family):
    """Version 3 of transformers wrote `do_blenderbot_90_layernorm`: the norm before positions."""
    raw = tiny.CONFIGS[family]
    plain = model_spec(raw).config
    assert model_spec({**raw, "do_blenderbot_90_layernorm": False}).config == plain
    with pytest.raises(UnsupportedError, match=r"^do_blenderbot_90_layernorm"):
        model_spec({**raw, "do_blenderbot_90_layernorm": True})


def test_layerdrop_is_refused_in_training_alone():
    model, plain = tiny.make("bart", decoder_layerdrop=0.1), tiny.cached("bart")
    ids = tiny.ids(2, 5)
    expected = plain(ids, labels=ids)
    np.testing.assert_array_equal(model(ids, labels=ids).logits, expected.logits)
    with pytest.raises(UnsupportedError, match=r"^decoder_layerdrop: training with LayerDrop is"):
        model(ids, labels=ids, dropout_key=jax.random.key(0))


def test_the_constant_has_no_weight_decay():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, weight_decay=0.1))
    model = tiny.cached("bart")
    state = TrainState.create(model, optimizer)
    ids = tiny.ids(2, 5)
    step = make_train_step(optimizer, loss_for(model))
    state, _ = step(state, {"input_ids": ids, "labels": ids})
    np.testing.assert_array_equal(state.params["final_logits_bias"], model.final_logits_bias[...])


def test_a_file_of_the_base_model(tmp_path):
    """It has no prefix and no constant of the logits; both are so again when it is saved."""
    tensors = {
        name.removeprefix("model."): x
        for name, x in load_file(FULL / "model.safetensors").items()
        if name != "final_logits_bias"
    }
    raw = json.loads((FULL / "config.json").read_text()) | {"architectures": ["BartModel"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = jaxllm.load(tmp_path)[0]
    assert not np.any(model.final_logits_bias[...])
    jaxllm.save_hf(tmp_path / "again", model)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(again[name], x)


def test_positions_of_a_file_are_checked_and_saved_again(tmp_path):
    """Pegasus's files hold the sinusoidal positions, here in bfloat16."""
    tensors = {
        name: x.astype(ml_dtypes.bfloat16)
        for name, x in load_file(PEGASUS / "model.safetensors").items()
    }
    shutil.copy(PEGASUS / "config.json", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.encoder.embed_positions.weight"
    save_file(tensors, file, metadata={"format": "pt"})
    jaxllm.save_hf(tmp_path / "again", jaxllm.load(tmp_path)[0])
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {n: x.tobytes() for n, x in again.items()} == {
        n: x.tobytes() for n, x in tensors.items()
    }
    tensors[name][3, 5] += 0.1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}, bfloat16\[40, 24\], holds other values"):
        jaxllm.load(tmp_path)


@pytest.mark.parametrize("steps", [4, 3])
def test_sinusoids_are_exact_at_large_positions(steps):
    sinusoids = Sinusoids(8, steps=steps, zero_row=7)
    rows = np.array([0, 1, 7, 100, 4095, 8191])
    computed = np.asarray(sinusoids(rows[None]))[0]
    np.testing.assert_allclose(computed, sinusoids.table(8192)[rows], atol=1e-6)
    assert not computed[2].any()
    angles = 8191 * 10000.0 ** (-np.arange(4) / steps)
    np.testing.assert_allclose(computed[-1], [*np.sin(angles), *np.cos(angles)], atol=1e-6)


def test_positions_beyond_the_context_of_m2m_100():
    model = tiny.cached("m2m_100")
    logits = model(tiny.ids(1, 70), decoder_input_ids=tiny.ids(1, 70)).logits
    assert logits.std() > 0.1


@pytest.mark.parametrize("family", ["mbart", "m2m_100", "pegasus"])
def test_the_encoder_stays_finite_in_float16(family):
    """Its residual stream grows from layer to layer, and is clamped, as in the reference."""
    options = Options(dtype=np.dtype(np.float16), param_dtype=np.dtype(np.float16))
    model = tiny.make(family, options=options)
    down = "encoder.blocks.0.mlp.down.weight"
    model = with_parameters(model, {down: parameters(model)[down] * 2.0**15})
    out = model.encode(tiny.ids(1, 6), output_hidden_states=True)
    largest = max(float(np.abs(x).max()) for x in out.hidden_states)
    assert 6e4 < largest < np.inf


def test_mbart_begins_with_the_last_token_of_the_labels():
    """In each row, and in packed rows in each document."""
    model = tiny.cached("mbart")  # pad is 1
    labels = np.array([[5, 6, 2, 30], [7, 2, 31, -100]])
    expected = [[30, 5, 6, 2], [31, 7, 2, 31]]
    np.testing.assert_array_equal(model.shift_right(labels), expected)
    packed = np.array([[5, 2, 30, 7, 8, 2, 31, -100]])
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    np.testing.assert_array_equal(
        model.shift_right(packed, segments)[:, :7], [[30, 5, 2, 31, 7, 8, 2]]
    )


def test_the_start_token_of_marian_keeps_its_embedding():
    """Lookups of the pad token, with which it begins, have no gradient, as in the reference."""
    model = tiny.make("marian", share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
    ids = tiny.ids(2, 5)
    gradients = parameters(jax.grad(lambda model: model(ids, labels=ids).loss)(model))
    gradient = np.asarray(gradients["decoder_input.embed.weight"])
    assert not gradient[1].any()
    assert gradient[ids[0, 0]].any()


def test_vocabularies_of_different_sizes():
    with pytest.raises(UnsupportedError, match=r"decoder_vocab_size: 60 differs from vocab_size"):
        tiny.make("marian", decoder_vocab_size=60)
    with pytest.raises(ConfigError, match="needs share_encoder_decoder_embeddings false"):
        tiny.make("marian", tie_word_embeddings=False)


def test_the_flax_class():
    """Names and layouts of transformers' Flax parameters, and its `encode` and `decode`."""
    model = FlaxBartForConditionalGeneration.from_pretrained(FULL)
    layer = model.params["model"]["decoder"]["layers"]["1"]
    assert layer["encoder_attn"]["q_proj"]["kernel"].shape == (24, 24)
    assert layer["fc1"]["kernel"].shape == (24, 37)
    assert set(layer["final_layer_norm"]) == {"scale", "bias"}
    assert model.params["model"]["encoder"]["embed_positions"]["embedding"].shape == (42, 24)
    ids = tiny.ids(2, 5, vocab=53)
    encoded = model.encode(ids)
    expected = model(ids, decoder_input_ids=ids[:, :3]).logits
    np.testing.assert_allclose(model.decode(ids[:, :3], encoded).logits, expected, atol=1e-5)


@pytest.mark.usefixtures("highest_precision")
def test_pads_that_no_mask_hides_have_no_positions_in_m2m_100():
    """In a prompt of the decoder and in the encoder; new tokens count them, as in transformers."""
    reference = dict(np.load(DATA / "decoder_pads" / "reference.npz"))
    inputs = {name: reference[name] for name in ("input_ids", "attention_mask")}
    prompt, model = reference["decoder_input_ids"], jaxllm.load(DATA / "parity" / "m2m_100_full")[0]
    assert reference["logits"].std() > 1
    actual = model(**inputs, decoder_input_ids=prompt).logits
    np.testing.assert_allclose(actual, reference["logits"], atol=1e-4)
    settings = {"max_new_tokens": 5, "eos_token_id": None, "num_beams": 1, "output_logits": True}
    settings |= {"do_sample": False, "forced_bos_token_id": None, "decoder_input_ids": prompt}
    out = jaxllm.generate(model, **inputs, **settings, return_dict_in_generate=True)
    np.testing.assert_array_equal(out.sequences, reference["sequences"])
    np.testing.assert_allclose(np.stack(out.logits), reference["steps"], atol=1e-4)


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({}, 0),  # BartConfig's bos_token_id
        ({"bos_token_id": 5}, 5),
        ({"bos_token_id": 5, "forced_bos_token_id": None}, 5),
        ({"bos_token_id": 5, "forced_bos_token_id": 9}, 9),
    ],
)
def test_the_old_name_of_a_forced_first_token(given, first, tmp_path):
    """BART's files of transformers 3, as BartConfig and GenerationConfig read them."""
    shutil.copytree(FULL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("forced_bos_token_id", "bos_token_id"):
        config.pop(name, None)
    config |= {"force_bos_token_to_be_generated": True, **given}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = jaxllm.load(tmp_path)[0]
    assert model.generation_config.forced_bos_token_id == first
    out = jaxllm.generate(model, tiny.ids(2, 5, vocab=53), max_new_tokens=3, num_beams=1)
    assert (np.asarray(out.sequences)[:, 1] == first).all()
