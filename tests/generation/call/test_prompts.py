"""Prompts of every kind: embeddings, encoder outputs, decoder prompts, cross-attention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import model
from generation_tools import (
    prompts,
)

import jaxllm
from jaxllm.common.errors import InputError


@pytest.mark.ci
def test_min_length_counts_the_embedded_prompt():
    """Both lengths count it, as in transformers."""
    net = model("s_llama")
    embeds = np.asarray(net.backbone.embed.weight[...])[None, [5, 6, 7, 8]]
    free = jaxllm.generate(net, inputs_embeds=embeds, max_new_tokens=8, eos_token_id=None)
    stop = int(free.sequences[0, 4])
    fields = {"max_new_tokens": 8, "eos_token_id": stop}
    short = jaxllm.generate(net, inputs_embeds=embeds, min_length=5, **fields).sequences
    first = int(np.flatnonzero(free.sequences[0] == stop)[0])
    assert short.shape[1] == first + 1


@pytest.mark.ci
def test_gpt2_cross_attention():
    net = model("s_gpt2_xattn")
    rng = np.random.default_rng(0)
    states = rng.normal(size=(2, 5, 32)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    ids = rng.integers(3, 90, (2, 4))
    inputs = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    out = jaxllm.generate(net, ids, max_new_tokens=6, eos_token_id=None, **inputs).sequences
    logits = net(out, **inputs).logits
    np.testing.assert_array_equal(np.argmax(logits, -1)[:, 3:-1], out[:, 4:])
    other = net(out, encoder_hidden_states=states * 2, encoder_attention_mask=mask).logits
    assert np.abs(other - logits).max() > 1e-2


@pytest.mark.ci
def test_t5_encoder_outputs_and_embeddings_stand_in_for_ids():
    net = model("s_t5_gated")
    _, ids, mask = prompts("s_t5_gated", side="right")
    fields = {"max_new_tokens": 8, "eos_token_id": None}
    expected = jaxllm.generate(net, ids, mask, **fields).sequences
    encoded = net(ids, mask, [[0]] * 3).encoder_last_hidden_state
    actual = jaxllm.generate(net, None, mask, encoder_outputs=encoded, **fields).sequences
    np.testing.assert_array_equal(actual, expected)
    embeds = net.shared(jnp.asarray(ids))
    actual = jaxllm.generate(net, None, mask, inputs_embeds=embeds, **fields).sequences
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.ci
def test_decoder_prompts_of_t5_do_not_depend_on_their_padding():
    net = model("s_t5_gated")
    fields = {"max_new_tokens": 6, "eos_token_id": None}
    source = [[5, 6, 7]]
    single = jaxllm.generate(net, source, decoder_input_ids=[[9, 8]], **fields).sequences
    assert single[0, :3].tolist() == [0, 9, 8]
    padded = jaxllm.generate(
        net,
        source * 2,
        decoder_input_ids=[[0, 0, 9, 8], [11, 12, 13, 14]],
        decoder_attention_mask=[[0, 0, 1, 1], [1, 1, 1, 1]],
        **fields,
    ).sequences
    np.testing.assert_array_equal(padded[0, 2:], single[0])
    states = np.zeros((1, 3, net.config.d_model), np.float32)
    with pytest.raises(InputError, match="inputs_embeds"):
        jaxllm.generate(net, inputs_embeds=states, encoder_outputs=states, **fields)
    with pytest.raises(InputError, match="token_type_ids"):
        jaxllm.generate(net, source, token_type_ids=[[0, 0, 0]], **fields)


@pytest.mark.parametrize(
    ("name", "off"), [("encoder_no_repeat_ngram_size", 0), ("encoder_repetition_penalty", 1.0)]
)
def test_settings_of_the_encoders_tokens_need_them(name, off):
    """The decoder's prompt does not stand in for them."""
    net = model("s_t5_gated")
    states = np.zeros((1, 3, net.config.d_model), np.float32)
    fields = {"max_new_tokens": 2, "decoder_input_ids": [[0, 5]], name: 2}
    for inputs in ({"encoder_outputs": states}, {"inputs_embeds": states}):
        with pytest.raises(InputError, match=f"^{name}: .*input_ids"):
            jaxllm.generate(net, **inputs, **fields)
    jaxllm.generate(net, [[5, 6, 7]], **fields)
    jaxllm.generate(net, encoder_outputs=states, **{**fields, name: off})
