"""T5Gemma: each field of both sides acts, what contradicts raises, and its two embeddings."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from test_config_fields import ACTS, op_by_op

import jaxllm
from jaxllm.common.errors import ConfigError, UnsupportedError
from jaxllm.models import T5GemmaConfig
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters

__all__ = ["op_by_op"]

RAW = tiny.CONFIGS["t5gemma"]
NOT_OF_A_SIDE = ("vocab_size", "tie_word_embeddings")
# The encoder's sizes are others than Gemma 2's, and only the decoder has logits.
OTHER = {
    ("encoder", "num_key_value_heads"): 3,
    ("encoder", "num_attention_heads"): 2,
    ("encoder", "intermediate_size"): 48,
}
FIELDS = [
    pytest.param(side, field, marks=pytest.mark.slow)
    for side in ("encoder", "decoder")
    for field in ACTS["gemma2"]
    if field not in NOT_OF_A_SIDE and (side, field) != ("encoder", "final_logit_softcapping")
]


def changed(side: str, **fields: Any) -> dict[str, Any]:
    return {side: {**RAW[side], **fields}}


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("side", "field"), FIELDS)
def test_fields_of_a_side_change_the_logits(side, field):
    value = OTHER.get((side, field), ACTS["gemma2"][field])
    before = tiny.logits(tiny.cached("t5gemma"))
    after = tiny.logits(tiny.make("t5gemma", **changed(side, **{field: value})))
    assert np.abs(after - before).max() > 1e-3 * before.std()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("encoder", vocab_size=60), "encoder.vocab_size: 60 contradicts vocab_size, 50"),
        (
            changed("decoder", dropout_rate=0.3),
            "decoder.dropout_rate: 0.3 contradicts dropout_rate",
        ),
        (changed("encoder", attention_dropout=0.1), "encoder.attention_dropout: 0.1 contradicts"),
        (
            {"decoder_start_token_id": 5},
            "decoder.bos_token_id: 2 contradicts decoder_start_token_id",
        ),
        ({"encoder": "gemma2"}, "encoder: expected an object, found 'gemma2'"),
        ({"encoder": 0}, "encoder: expected an object, found 0"),
        ({"encoder": None}, "encoder: missing"),
        (changed("encoder", tie_word_embeddings=3), "encoder.tie_word_embeddings: expected bool"),
        (changed("decoder", hidden_activation="x"), "decoder.hidden_activation: unknown activ"),
        (
            changed("decoder", cross_attention_hidden_size=99),
            "decoder.cross_attention_hidden_size: 99 contradicts encoder.hidden_size, 24",
        ),
        (changed("decoder", head_dim=7), "decoder.head_dim: rotary embeddings need an even number"),
        (changed("decoder", logit_scale=2.0), r"decoder.logit_scale \(2.0\): unknown"),
        ({"dropout_rate": 1.0}, "dropout_rate: expected 0 <= rate < 1"),
        (
            changed("encoder", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "encoder.rope_type: dynamic and longrope RoPE",
        ),
    ],
)
def test_what_raises(change, message):
    with pytest.raises((ConfigError, UnsupportedError), match=rf"^{message}"):
        model_spec({**RAW, **change})


def test_what_a_side_repeats_changes_nothing():
    sides = changed("encoder", tie_word_embeddings=False)
    sides |= changed("decoder", cross_attention_hidden_size=24)
    assert model_spec({**RAW, **sides}).config == model_spec(RAW).config


def test_tokens_that_the_top_level_lacks_are_the_decoders():
    config = model_spec({**RAW, **changed("decoder", bos_token_id=7, eos_token_id=[8, 9])}).config
    assert (config.bos_token_id, config.decoder_start_token_id) == (7, 7)
    assert config.eos_token_ids == (8, 9)
    assert T5GemmaConfig(vocab_size=70).encoder.vocab_size == 70


@pytest.mark.ci
def test_both_embeddings_are_trained_and_resized():
    model = tiny.cached("t5gemma")
    ids = {"input_ids": tiny.ids(2, 5), "labels": tiny.ids(2, 4)}
    gradients = parameters(jax.grad(lambda model: model(**ids).loss)(model))
    larger = model.resize_token_embeddings(60)
    for name in ("shared.weight", "decoder_input.embed.weight"):
        assert gradients[name].any()
        assert len(parameters(larger)[name]) == 60
    assert larger.config.encoder.vocab_size == larger.config.decoder.vocab_size == 60
    logits = larger(ids["input_ids"], decoder_input_ids=ids["labels"]).logits
    assert logits.shape == (2, 4, 60)


@pytest.mark.ci
def test_an_encoder_output_has_the_encoders_width():
    """It differs from the decoder's, in calls and in generation."""
    model, ids = tiny.cached("t5gemma"), tiny.ids(2, 5)
    states = model.encode(ids).x
    assert states.shape == (2, 5, 24)
    expected = tiny.logits(model, ids, decoder_input_ids=ids)
    out = model(encoder_outputs=states, decoder_input_ids=ids)
    np.testing.assert_allclose(out.logits, expected, atol=1e-5 * expected.std())
    tokens = model.generate(ids, max_new_tokens=4).sequences
    again = model.generate(encoder_outputs=states, max_new_tokens=4).sequences
    np.testing.assert_array_equal(again, tokens)
    with pytest.raises(jaxllm.JaxLLMError, match=re.escape("encoder_outputs: expected")):
        model(encoder_outputs=states[..., :20], decoder_input_ids=ids)
