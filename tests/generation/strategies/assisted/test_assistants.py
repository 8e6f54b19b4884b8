"""From settings to a draft: the assistant's own file, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from conformance_runs import DATA, model
from generation_tools import drafts
from tiny import make

import jaxllm
from jaxllm.common.errors import InputError, UnsupportedError


@pytest.mark.ci
def test_settings_of_the_assistants_file_hold_where_the_call_names_none():
    assistant = jaxllm.load(DATA / "models" / "s_llama")[0]
    own = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}
    assistant.generation_config = jaxllm.GenerationConfig(**own)
    fields = {"max_new_tokens": 13, "eos_token_id": None, "assistant_model": assistant}
    ids = [[5, 6, 7]]
    out = jaxllm.generate(model("s_llama"), ids, **fields).assisted
    assert out.target_calls.tolist() == [1 + 3]
    out = jaxllm.generate(model("s_llama"), ids, **fields, num_assistant_tokens=2).assisted
    assert out.target_calls.tolist() == [1 + 4]


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"assistant_model": object()}, UnsupportedError, "assistant_model"),
        ({"assistant_model": "s_t5"}, UnsupportedError, "encoder-decoder"),
        ({"assistant_model": "s_gpt2_scaled"}, UnsupportedError, "vocabulary"),
        ({"assistant_tokenizer": 1}, UnsupportedError, "assistant_tokenizer"),
        (
            {"assistant_ensemble_weight": 0.5, "prompt_lookup_num_tokens": 2},
            UnsupportedError,
            "assistant_ensemble_weight: mixes",
        ),
        ({"assistant_ensemble_weight": 1.0}, InputError, "assistant_ensemble_weight"),
        ({"assistant_early_exit": 99}, InputError, "99"),
        ({"prompt_lookup_num_tokens": 0}, InputError, "prompt_lookup_num_tokens"),
        ({"prompt_lookup_num_tokens": 2, "assistant_early_exit": 1}, InputError, "one of them"),
        ({"prompt_lookup_num_tokens": 2, "num_beams": 2}, UnsupportedError, "drafts go with"),
        ({"prompt_lookup_num_tokens": 2, "dola_layers": "low"}, UnsupportedError, "dola_layers"),
        ({"prompt_lookup_num_tokens": 2, "use_cache": False}, UnsupportedError, "use_cache"),
        ({"prompt_lookup_num_tokens": 2, "num_return_sequences": 2}, InputError, "greedy"),
    ],
)
def test_what_cannot_be_is_named(fields, error, named):
    if isinstance(fields.get("assistant_model"), str):
        fields = {**fields, "assistant_model": model(fields["assistant_model"])}
    with pytest.raises(error, match=named):
        jaxllm.generate(model("s_llama"), [[5, 6, 7]], **fields)


@pytest.mark.slow
def test_rope_that_depends_on_the_length_is_refused_beyond_its_limit():
    net = model("s_llama_longrope")
    limit = net.config.rotary.original_positions
    fields = {"prompt_lookup_num_tokens": 3, "eos_token_id": None}
    ids = [[5, 6, 5, 6]]
    expected = jaxllm.generate(net, ids, max_length=limit, eos_token_id=None).sequences
    actual = jaxllm.generate(net, ids, max_length=limit, **fields).sequences
    np.testing.assert_array_equal(actual, expected)
    with pytest.raises(UnsupportedError, match="longrope"):
        jaxllm.generate(net, ids, max_length=limit + 1, **fields)


def test_an_assistant_needs_as_many_positions():
    ids = np.full((1, 90), 7)
    short = make("gpt2", vocab_size=model("s_gpt2").config.vocab_size)
    with pytest.raises(InputError, match="assistant_model has 64"):
        jaxllm.generate(model("s_gpt2"), ids, max_new_tokens=6, assistant_model=short)


@pytest.mark.slow
def test_gpt2_has_a_hard_end():
    """Drafts are never longer than the model has positions for."""
    net, ids = model("s_gpt2"), np.full((1, 90), 7)
    fields = {"max_new_tokens": 6, "eos_token_id": None}
    expected = jaxllm.generate(net, ids, **fields).sequences
    actual = jaxllm.generate(net, ids, **fields, **drafts("s_gpt2")["assistant"]).sequences
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("sizes", [(64, 60), (60, 64)])
def test_an_embedding_that_is_padded_further_is_resized(sizes):
    """Qwen2.5's small and large models have 151936 and 152064 rows for one tokenizer."""
    model, draft = (make("llama", vocab_size=size, seed=size) for size in sizes)
    with pytest.raises(
        UnsupportedError, match=r"call resize_token_embeddings\(64\) of the other one"
    ):
        model.generate([[5, 6]], assistant_model=draft, max_new_tokens=8)
    model, draft = (each.resize_token_embeddings(64) for each in (model, draft))
    expected = model.generate([[5, 6]], max_new_tokens=8).sequences
    drafted = model.generate([[5, 6]], assistant_model=draft, max_new_tokens=8).sequences
    assert drafted.tolist() == expected.tolist()
