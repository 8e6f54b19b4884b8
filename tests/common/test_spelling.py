"""Guesses at misspelt names: made for slips of the keyboard, and not for other names."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest

from jaxllm.common.errors import ConfigError
from jaxllm.common.spelling import closest, is_misspelt
from jaxllm.common.validation import from_plain
from jaxllm.generation.settings.config import FIELDS
from jaxllm.serve.http.api_types import ChatRequest, CompletionRequest
from jaxllm.training.run.recipe import Recipe

REQUEST = [field.name for field in dataclasses.fields(CompletionRequest)]
CHAT = [field.name for field in dataclasses.fields(ChatRequest)]
RECIPE = [field.name for field in dataclasses.fields(Recipe)]


@pytest.mark.parametrize(
    "name",
    [
        "stop_token_ids",
        "structured_outputs",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "typical_p",
        "truncate_prompt_tokens",
        "guided_json",
        "guided_regex",
        "allowed_token_ids",
        "bad_words",
        "length_penalty",
        "top_a",
        "top_n_tokens",
        "priority",
        "request_id",
        "cache_salt",
        "verbosity",
        "tokens_to_generate",
        "mirostat",
        "return_full_text",
        "num_predict",
        "samplers",
        "detokenize",
        "output_kind",
        "spaces_between_special_tokens",
        "eos_token_id",
        "watermark",
        "decoder_input_details",
        "n_predict",
    ],
)
def test_fields_of_other_servers_are_no_slips(name):
    assert closest(name, REQUEST) is None
    with pytest.raises(ConfigError, match=f"^{name}: unknown; known: "):
        from_plain(CompletionRequest, {"prompt": "a", name: 1})


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("min_length", "max_length"),
        ("bos_token_id", "eos_token_id"),
        ("top_k", "top_p"),
        ("do_sample", "no_sample"),
        ("encoder_layers", "decoder_layers"),
        ("input_dir", "output_dir"),
        ("src_lang", "tgt_lang"),
        ("text1", "text2"),
        ("bf16", "fp16"),
        ("chat_template", "chat_template_kwargs"),
        ("train_batch_size", "eval_batch_size"),
        ("presence_penalty", "frequency_penalty"),
        ("", "n"),
        ("--", "--n"),
        ("k", "n"),
        ("max_tokens" * 200_000, "max_tokens"),
    ],
)
def test_other_names_are_no_slips(name, known):
    assert closest(name, [known]) is None
    assert closest(known, [name]) is None
    assert not is_misspelt(name, known)


@pytest.mark.parametrize(
    ("name", "known", "names"),
    [
        ("top_pp", "top_p", REQUEST),
        ("topp", "top_p", REQUEST),
        ("top-k", "top_k", REQUEST),
        ("temprature", "temperature", REQUEST),
        ("tempreture", "temperature", REQUEST),
        ("temp", "temperature", REQUEST),
        ("Temperature", "temperature", REQUEST),
        ("maxTokens", "max_tokens", REQUEST),
        ("max_token", "max_tokens", REQUEST),
        ("max_new_tokens", "max_tokens", REQUEST),
        ("max_output_tokens", "max_tokens", REQUEST),
        ("repetiton_penalty", "repetition_penalty", REQUEST),
        ("frequency_penality", "frequency_penalty", REQUEST),
        ("stopp", "stop", REQUEST),
        ("sede", "seed", REQUEST),
        ("paralel_tool_call", "parallel_tool_calls", CHAT),
        ("mesages", "messages", CHAT),
        ("max_step", "max_steps", RECIPE),
        ("ouput_dir", "output_dir", RECIPE),
        ("max_seq_len", "max_seq_length", ["max_seq_length"]),
        ("recipe.yml", "recipe.yaml", ["recipe.yaml", "other.yaml"]),
        ("smollm", "smollm2", ["smollm2"]),
        ("num_beam", "num_beams", FIELDS),
        ("encoder_no_repeat_ngram", "encoder_no_repeat_ngram", ["encoder_no_repeat_ngram"]),
    ],
)
def test_slips_are_understood(name, known, names):
    assert closest(name, names) == known


def test_a_letter_left_out_doubled_or_swapped_is_understood_in_every_field():
    rng, found, count = random.Random(0), 0, 0
    for names in (REQUEST, CHAT, RECIPE, list(FIELDS)):
        for name in names:
            places = [i for i in range(1, len(name) - 1) if re.match("[a-z]{2}", name[i : i + 2])]
            if len(name) < 5 or not places:
                continue
            i = rng.choice(places)
            swapped = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
            for slip in (name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:], swapped):
                count += slip not in names
                found += slip not in names and closest(slip, names) == name
    assert count > 300
    assert found > 0.99 * count  # forced_os_token_id may be either of two
