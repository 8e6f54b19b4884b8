"""Wrong arguments of a call: errors that name them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from parity_runs import model_of

from jaxllm.common.errors import InputError

IDS = tiny.ids()
ONES = np.ones((2, 9), int)


def bad_id(value) -> np.ndarray:
    ids = IDS.astype(np.int64)
    ids[1, 4] = value
    return ids


DECODER_ONLY = [
    ({"input_ids": np.broadcast_to(5, (1, 2**40))}, "input_ids: 1099511627776 token ids at once"),
    ({"input_ids": bad_id(2**40 + 5)}, r"input_ids\[1, 4\]: id 1099511627781 is not in the voc"),
    ({"input_ids": bad_id(-1)}, r"input_ids\[1, 4\]: id -1"),
    ({"input_ids": bad_id(50)}, r"input_ids\[1, 4\]: id 50 .*\(0 to 49\)"),
    ({"input_ids": IDS.astype(float)}, "input_ids: expected integers, found float64"),
    ({"input_ids": IDS[0]}, "input_ids: expected a non-empty"),
    ({"input_ids": IDS[:, :0]}, "input_ids: expected a non-empty"),
    ({"input_ids": IDS[:0]}, "input_ids: expected a non-empty"),
    ({"input_ids": [[3, 4], [5]]}, "input_ids: rows of different lengths; pad them"),
    ({"input_ids": [["a", "b"]]}, "input_ids: expected token ids, found the text"),
    ({}, "input_ids, inputs_embeds: give exactly one"),
    ({"input_ids": IDS, "inputs_embeds": np.ones((2, 9, 32))}, "give exactly one"),
    ({"inputs_embeds": np.ones((2, 9, 31), np.float32)}, r"inputs_embeds: .*32\], found"),
    ({"inputs_embeds": np.ones((2, 9, 32), int)}, "inputs_embeds: expected floats"),
    ({"inputs_embeds": np.ones((2, 32), np.float32)}, "inputs_embeds: expected a non-empty"),
    ({"attention_mask": ONES[:, :8]}, "attention_mask: expected shape"),
    ({"attention_mask": ONES[0]}, "attention_mask: expected shape"),
    ({"attention_mask": ONES * 2}, "attention_mask: expected 0 and 1 only"),
    ({"attention_mask": ONES - 0.5}, "attention_mask: expected 0 and 1 only"),
    ({"attention_mask": np.full((2, 9), np.nan)}, "attention_mask: expected 0 and 1 only"),
    ({"position_ids": ONES[:, :8]}, "position_ids: expected shape"),
    ({"position_ids": ONES * 1.0}, "position_ids: expected integers"),
    ({"position_ids": -ONES}, "position_ids: expected 0 to"),
    ({"position_ids": ONES * 2**40}, "position_ids: expected 0 to"),
    ({"head_mask": np.ones((3, 4))}, r"head_mask: expected shape \(2, 4\) or \(4,\)"),
    ({"head_mask": np.ones((1, 4))}, r"head_mask: expected shape \(2, 4\)"),
    ({"labels": IDS[:, :8]}, "labels: expected shape"),
    ({"labels": bad_id(-1)}, "labels: expected 0 to 49 or -100"),
    ({"labels": bad_id(50)}, "labels: expected 0 to 49 or -100"),
    ({"labels": IDS * 1.0}, "labels: expected integers"),
    ({"labels": IDS, "logits_to_keep": 2}, "logits_to_keep: the loss of labels needs all"),
    ({"labels": IDS, "logits_to_keep": [0]}, "logits_to_keep: the loss of labels needs all"),
    ({"logits_to_keep": -3}, "logits_to_keep: expected 0 or more"),
    ({"logits_to_keep": [9]}, "logits_to_keep: expected columns 0 to 8"),
    ({"logits_to_keep": 1.5}, "logits_to_keep: expected an integer"),
    ({"encoder_attention_mask": ONES}, "encoder_attention_mask: given without"),
    ({"encoder_hidden_states": np.ones((2, 3, 32))}, "this model has no cross-attention"),
]
ONE_FAMILY = [
    ("llama", {"token_type_ids": ONES}, "token_type_ids: only GPT-2, GPT-Neo and GPT-J have them"),
    ("gpt2", {"token_type_ids": ONES * 50}, r"token_type_ids\[0, 0\]: id 50"),
    ("gpt2", {"token_type_ids": ONES[:, :8]}, "token_type_ids: expected"),
    ("gpt2", {"position_ids": ONES * 64}, "position_ids: expected 0 to 63"),
    ("gpt2", {"input_ids": tiny.ids(1, 65)}, "65 tokens, but this model has 64 positions"),
]
T5 = [
    ({"input_ids": bad_id(-1)}, r"input_ids\[1, 4\]: id -1"),
    ({"decoder_input_ids": bad_id(50)}, r"decoder_input_ids\[1, 4\]: id 50"),
    ({"decoder_input_ids": IDS[:1]}, "decoder_input_ids: 1 rows, but the encoder has 2"),
    ({"decoder_input_ids": None}, "decoder_input_ids, decoder_inputs_embeds: give exactly one"),
    ({"attention_mask": ONES[:, 1:]}, "attention_mask: expected shape"),
    ({"decoder_attention_mask": ONES[:, 1:]}, "decoder_attention_mask: expected shape"),
    ({"decoder_inputs_embeds": np.ones((2, 9, 32), np.float32)}, "give exactly one"),
    ({"inputs_embeds": np.ones((2, 9, 32), np.float32)}, "give exactly one"),
    ({"head_mask": np.ones((3, 4))}, "^head_mask"),
    ({"decoder_head_mask": np.ones((3, 4))}, "decoder_head_mask"),
    ({"cross_attn_head_mask": np.ones(3)}, "cross_attn_head_mask"),
    ({"labels": bad_id(-1)}, "labels: expected 0 to 49"),
    ({"labels": IDS[:, :8]}, "labels: expected shape"),
    ({"encoder_outputs": np.ones((2, 9, 32), np.float32)}, "input_ids: has no effect beside"),
    ({"input_ids": None, "encoder_outputs": np.ones((1, 2, 9, 32))}, "encoder_outputs: expected"),
    (
        {
            "input_ids": None,
            "encoder_outputs": np.ones((2, 9, 32), np.float32),
            "head_mask": np.ones(4),
        },
        "head_mask: has no effect beside",
    ),
]


@pytest.mark.in_ci(
    "inputs20-position_ids: expected shape-llama",
    "inputs26-labels: expected shape-gpt2",
    "inputs26-labels: expected shape-llama",
    "inputs30-logits_to_keep: the loss of labels needs all-llama",
    "inputs31-logits_to_keep: the loss of labels needs all-llama",
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("inputs", "message"), DECODER_ONLY)
def test_decoder_only(family, inputs, message):
    if inputs and not {"input_ids", "inputs_embeds"} & inputs.keys():
        inputs = {"input_ids": IDS, **inputs}
    with pytest.raises(InputError, match=message):
        tiny.cached(family)(**inputs)


@pytest.mark.parametrize(("family", "inputs", "message"), ONE_FAMILY)
def test_one_family(family, inputs, message):
    with pytest.raises(InputError, match=message):
        tiny.cached(family)(**{"input_ids": IDS, **inputs})


@pytest.mark.in_ci(
    "inputs1-decoder_input_ids\\\\[1, 4\\\\]: id 50",
    "inputs11-labels: expected 0 to 49",
    "inputs2-decoder_input_ids: 1 rows, but the encoder has 2",
)
@pytest.mark.parametrize(("inputs", "message"), T5)
def test_t5(inputs, message):
    with pytest.raises(InputError, match=message):
        tiny.cached("t5")(**{"input_ids": IDS, "decoder_input_ids": IDS, **inputs})


@pytest.mark.ci
def test_cross_attention():
    model = model_of("gpt2_cross")
    ids, states = np.full((2, 3), 5), np.ones((2, 4, model.config.n_embd), np.float32)
    for inputs, message in (
        ({"encoder_hidden_states": states[:1]}, "encoder_hidden_states: 1 rows, but the call"),
        ({"encoder_hidden_states": states[..., 1:]}, "encoder_hidden_states: expected"),
        (
            {"encoder_hidden_states": states, "encoder_attention_mask": np.ones((2, 3))},
            "encoder_attention_mask: expected shape",
        ),
    ):
        with pytest.raises(InputError, match=message):
            model(ids, **inputs)


def test_shapes_and_dtypes_are_checked_under_jit_too():
    model = tiny.cached("llama")
    call = jax.jit(lambda **inputs: model(**inputs).logits)
    for inputs, message in (
        ({"input_ids": jnp.ones((2, 9))}, "input_ids: expected integers"),
        ({"input_ids": jnp.ones(9, int)}, "input_ids: expected a non-empty"),
        (
            {"input_ids": jnp.asarray(IDS), "attention_mask": jnp.ones((2, 8))},
            "attention_mask: expected shape",
        ),
    ):
        with pytest.raises(InputError, match=message):
            call(**inputs)
    short = tiny.make("gpt2", n_positions=8)
    with pytest.raises(InputError, match="8 positions"):
        jax.jit(lambda ids: short(ids).logits)(jnp.asarray(IDS))


def test_a_traced_id_out_of_range_is_no_nan():
    """An id that cannot be checked is at least not turned into a stream of token 0."""
    model = tiny.cached("llama")
    logits = jax.jit(lambda ids: model(ids).logits)(jnp.full((1, 3), 10**6))
    assert np.isfinite(logits).all()


CLASSIFIERS = [
    ({"labels": np.array([0, 3])}, "labels: expected 0 to 2"),
    ({"labels": np.array([0, -1])}, "labels: expected 0 to 2"),
    ({"labels": np.array([0, 1, 2])}, "labels: expected one a row"),
    ({"labels": np.ones((2, 2))}, "labels: expected shape"),
    ({"attention_mask": None}, "attention_mask: needed for a batch"),
    ({"cache": object()}, "cache: a classifier reads its sequence in one call"),
]


@pytest.mark.by_default(
    "inputs3-labels: expected shape", "inputs5-cache: a classifier reads its sequence in one call"
)
@pytest.mark.parametrize(("inputs", "message"), CLASSIFIERS)
def test_classifier(inputs, message):
    model = tiny.make("llama", architecture="LlamaForSequenceClassification", num_labels=3)
    with pytest.raises(InputError, match=message):
        model(**{"input_ids": IDS, "attention_mask": ONES, **inputs})


@pytest.mark.ci
def test_the_encoder_of_t5_takes_the_names_of_a_tokenizers_output():
    model = tiny.cached("t5")
    mask = np.arange(9) < np.array([[9], [4]])
    own = model(IDS, mask, decoder_input_ids=IDS[:, :1]).encoder_last_hidden_state
    states = model.encode(input_ids=IDS, attention_mask=mask.astype(int)).x
    np.testing.assert_array_equal(states[mask], own[mask])
    np.testing.assert_array_equal(model.encode(IDS).x[0], states[0])
