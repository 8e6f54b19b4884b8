"""The host's side of a call: what cannot be is named, before anything is compiled."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import tiny
from conformance_runs import DATA, model
from generation_tools import prompts

import jaxllm
from jaxllm.common.errors import ConfigError, InputError, UnsupportedError
from jaxllm.generation.generate import prepare_call
from jaxllm.generation.settings.resolve import merged_config


@pytest.mark.ci
def test_end_tokens_of_all_files_count_unless_one_is_named():
    net = jaxllm.load(DATA / "models" / "s_llama")[0]
    _, ids, _ = prompts("s_llama", (7,))
    free = jaxllm.generate(net, ids, max_new_tokens=8, eos_token_id=None).sequences[0, 7:]
    net = net.with_card(tokenizer_eos=(int(free[4]),))
    cut = jaxllm.generate(net, ids, max_new_tokens=8).sequences[0, 7:]
    first = int(np.flatnonzero(free == free[4])[0])
    np.testing.assert_array_equal(cut, free[: first + 1])
    named = jaxllm.generate(net, ids, max_new_tokens=8, eos_token_id=2).sequences[0, 7:]
    assert len(named) == 8 or named[-1] == 2


def test_the_tokenizers_end_token_counts_unless_one_is_named():
    net = model("s_llama").with_card(tokenizer_eos=(7,))
    assert set(merged_config(net, None, {})[1]) == {2, 7}
    assert merged_config(net, None, {"eos_token_id": 5})[1] == (5,)


@pytest.mark.in_ci(
    "inputs23-must return sco", "inputs24-returned bool", "inputs30-expected a list of"
)
@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"input_ids": [[131]]}, r"input_ids\[0, 0\].*131"),
        ({"input_ids": np.array([[2**40 + 5]])}, "not in the vocabulary"),
        ({"input_ids": [[-1]]}, "not in the vocabulary"),
        ({"input_ids": np.zeros((0, 3), int)}, "non-empty"),
        ({"input_ids": np.zeros((1, 0), int)}, "non-empty"),
        ({"input_ids": [[1.5]]}, "integers"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1]]}, "attention_mask"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1, 2]]}, "0 and 1"),
        ({"input_ids": [[5, 6]], "attention_mask": [[0, 0]]}, "no real token"),
        ({"input_ids": [[5]], "max_length": 1}, "max_length"),
        ({"input_ids": [[5]], "row_ids": [1, 2]}, "row_ids"),
        ({"input_ids": [[5]], "key": "seed"}, "key"),
        ({"input_ids": [[5]], "decoder_input_ids": [[1]]}, "decoder_input_ids"),
        ({"input_ids": [[5]], "temprature": 0.5}, "temperature"),
        ({"input_ids": [[5]], "eos_token_id": 500}, "eos_token_id"),
        ({"input_ids": [[5]], "num_return_sequences": 2}, "num_return_sequences"),
        ({"input_ids": [[5]], "max_new_tokens": 10**9}, "max_new_tokens"),
        ({"input_ids": [[5]], "pad_token_id": 999}, "pad_token_id"),
        ({"input_ids": [[5]], "row_ids": [-1]}, "row_ids"),
        ({"inputs_embeds": np.zeros((1, 3, 7))}, "inputs_embeds"),
        ({"input_ids": [[5]], "encoder_attention_mask": [[1]]}, "encoder_attention_mask"),
        ({"input_ids": [[5]], "logits_processor": len}, "logits_processor"),
        ({"attention_mask": [[1]]}, "attention_mask: given without input_ids"),
        ({"input_ids": [[5], [6]], "logits_processor": [lambda a, b, c: b[:1]]}, "must return sco"),
        ({"input_ids": [[5]], "logits_processor": [lambda a, b, c: b > 0]}, "returned bool"),
        ({"input_ids": [[5]], "logits_processor": [lambda a, b, c: None]}, "returned NoneType"),
        ({"input_ids": [[5]], "stopping_criteria": [lambda a, b, c: 1]}, "stopping_criteria: <lam"),
        ({"input_ids": [[5]], "stopping_criteria": [lambda a, b, c: b]}, "must return booleans"),
        ({"input_ids": [[5]], "constraints": 3, "num_beams": 2}, "`constraints` must be a list"),
        ({"input_ids": [[5]], "constraints": []}, "constraints: constraints need beams"),
        ({"input_ids": [[5]], "prefix_allowed_tokens_fn": lambda b, i: 5}, "expected a list of"),
        ({"input_ids": [[5]], "streamer": 3}, "streamer: expected an object"),
        ({"input_ids": [[5]], "assistant_early_exit": 9}, "assistant_early_exit"),
        ({"input_ids": [[5]], "num_beams": 10**7}, "num_beams: 10000000"),
        ({"input_ids": [[5]], "num_beams": 3, "num_beam_groups": 2}, "num_beam_groups"),
        ({"input_ids": [[5]], "num_beam_groups": 2}, "num_beam_groups"),
    ],
)
def test_bad_input_is_named(inputs, match):
    with pytest.raises(InputError, match=match):
        jaxllm.generate(model("s_llama"), **inputs)


@pytest.mark.parametrize(
    "fields",
    [
        {"assistant_tokenizer": 1},
        {"use_cache": False},
    ],
)
def test_unsupported_options_raise_by_name(fields):
    with pytest.raises(UnsupportedError, match=next(iter(fields))):
        jaxllm.generate(model("s_llama"), [[5]], **fields)


@pytest.mark.ci
def test_a_files_settings_that_transformers_accepts_do_not_stop_generate():
    net, [_, ids, _] = copy.copy(model("s_llama")), prompts("s_llama", (7,))
    fields = {"use_cache": False, "cache_implementation": "hybrid", "output_scores": True}
    tokens = {"eos_token_id": [10**6, 2], "pad_token_id": 10**6, "bos_token_id": 10**6}
    greedy = {"temperature": 0.0, "top_p": 0, "do_sample": False}
    net.generation_config = jaxllm.GenerationConfig.from_dict(fields | tokens | greedy)
    out = jaxllm.generate(net, ids, max_new_tokens=4)
    plain = jaxllm.generate(model("s_llama"), ids, max_new_tokens=4, eos_token_id=2)
    np.testing.assert_array_equal(out.sequences, plain.sequences)
    assert out.scores is None
    with pytest.raises(ConfigError, match=r"files: `temperature` must be .*do_sample=False"):
        jaxllm.generate(net, ids, max_new_tokens=4, do_sample=True)


def test_what_stream_cannot_give_is_named():
    for fields in ({"chunk_size": 2.5}, {"chunk_size": 0}, {"output_scores": True}):
        with pytest.raises(InputError, match=next(iter(fields))):
            next(jaxllm.stream(model("s_llama"), [[5]], **fields))
    settings = jaxllm.GenerationConfig(output_logits=True)
    with pytest.raises(InputError, match="output_logits"):
        next(jaxllm.stream(model("s_llama"), [[5]], generation_config=settings))


@pytest.mark.ci
def test_gpt2_has_a_hard_end():
    net = model("s_gpt2")
    ids = np.full((1, 90), 7)
    out = jaxllm.generate(net, ids, max_new_tokens=6, eos_token_id=None).sequences
    assert out.shape == (1, 96)
    with pytest.raises(InputError, match="at most 6"):
        jaxllm.generate(net, ids, max_new_tokens=7)
    padded = np.concatenate([np.zeros((1, 20), int), ids], axis=1)
    mask = np.concatenate([np.zeros((1, 20), int), np.ones((1, 90), int)], axis=1)
    more = jaxllm.generate(net, padded, mask, max_new_tokens=6, eos_token_id=None).sequences
    np.testing.assert_array_equal(more[:, 20:], out)


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("llama", {}, "70 tokens, but the model's context has 64"),
        ("gpt2", {"max_new_tokens": 5}, "70 tokens, but this model has 64 positions.*shorten"),
    ],
)
def test_a_prompt_beyond_the_context_names_its_limit(family, fields, match):
    with pytest.raises(InputError, match=match):
        prepare_call(tiny.cached(family), tiny.ids(1, 70), None, None, None, fields)


def test_a_start_token_without_a_decoder_to_start_warns():
    with pytest.warns(UserWarning, match="`decoder_start_token_id` has no effect"):
        prepare_call(model("s_llama"), [[3]], None, None, None, {"decoder_start_token_id": 1})
