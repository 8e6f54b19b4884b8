"""Caches that outlive a call: conversations go on where they were."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny
from compiling import program_count
from generation_tools import NO_EOS, padded, turns

import jaxllm
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation import loop
from jaxllm.generation.generate import prepare_call
from jaxllm.generation.settings.config import GenerationConfig


@pytest.mark.ci
@pytest.mark.parametrize(("family", "side"), [("llama", "left"), ("gpt2", "right")])
def test_three_ragged_turns_equal_generating_from_scratch(family, side):
    """Rows are of unequal lengths, and some end early; scores of every step are those of a call
    that reads everything anew."""
    model = tiny.cached(family)
    settings = {"max_new_tokens": 5, "min_new_tokens": 2, "pad_token_id": 0, "output_scores": True}
    rows, past, ended = turns(0, 4, 1, 7), None, 0
    for turn in range(3):
        ids, mask = padded(rows, side)
        plain = jaxllm.generate(model, ids, mask, eos_token_id=None, **settings)
        # An end token that row 0 reaches before the others.
        eos = int(plain.sequences[0, -3])
        settings["eos_token_id"] = eos
        expected = jaxllm.generate(model, ids, mask, **settings)
        out = jaxllm.generate(
            model, ids, mask, past_key_values=past, return_past_key_values=True, **settings
        )
        np.testing.assert_array_equal(out.sequences, expected.sequences)
        live = np.ones(3, bool)
        for column, (a, b) in enumerate(zip(out.scores, expected.scores, strict=True)):
            np.testing.assert_allclose(a[live], b[live], atol=2e-4)
            live &= np.asarray(out.sequences)[:, ids.shape[1] + column] != eos
        ended += int((~live).sum())
        new = np.asarray(out.sequences)[:, ids.shape[1] :].tolist()
        new = [row[: row.index(eos) + 1] if eos in row else row for row in new]
        more = turns(turn + 5, 3, 6, 1)
        rows = [r + t + m for r, t, m in zip(rows, new, more, strict=True)]
        past = out.past_key_values
        del settings["eos_token_id"]
    assert ended > 0


@pytest.mark.ci
def test_t5_continues_its_decoder_without_the_encoder():
    model, settings = tiny.cached("t5"), {"max_new_tokens": 4, **NO_EOS}
    ids, mask = padded(turns(0, 6, 3))
    out = jaxllm.generate(model, ids, mask, return_past_key_values=True, **settings)
    for turn in range(2):
        sides = np.concatenate([out.sequences, turns(turn, 2, 2)], axis=1)
        expected = jaxllm.generate(model, ids, mask, decoder_input_ids=sides, **settings)
        out = jaxllm.generate(
            model,
            decoder_input_ids=sides,
            past_key_values=out.past_key_values,
            return_past_key_values=True,
            **settings,
        )
        np.testing.assert_array_equal(out.sequences, expected.sequences)


@pytest.mark.slow
def test_t5_with_ragged_decoder_prompts():
    """Distances between columns give T5 its bias; the same whether rows have pads or not."""
    model, settings = tiny.cached("t5"), {"max_new_tokens": 4, "encoder_repetition_penalty": 1.5}
    settings.update(NO_EOS, output_scores=True)
    ids, mask = padded(turns(0, 6, 3))
    first = jaxllm.generate(model, ids, mask, return_past_key_values=True, **settings)
    rows = [s + m for s, m in zip(first.sequences.tolist(), turns(9, 1, 4), strict=True)]
    sides, side_mask = padded(rows)
    inputs = {"decoder_input_ids": sides, "decoder_attention_mask": side_mask}
    expected = jaxllm.generate(model, ids, mask, **inputs, **settings)
    out = jaxllm.generate(model, past_key_values=first.past_key_values, **inputs, **settings)
    np.testing.assert_array_equal(out.sequences, expected.sequences)
    for a, b in zip(out.scores, expected.scores, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.ci
def test_only_new_tokens_are_read():
    """The program of a continued call reads the bucket of the new tokens, whatever came before."""
    model, ids = tiny.cached("llama"), np.array(turns(0, 40))
    out = jaxllm.generate(model, ids, max_new_tokens=2, return_past_key_values=True, **NO_EOS)
    call = prepare_call(
        model,
        np.concatenate([out.sequences, [[5]]], axis=1),
        None,
        None,
        None,
        {"past_key_values": out.past_key_values, "max_new_tokens": 2, **NO_EOS},
    )
    assert call.inputs.decoder_inputs["tokens"].shape == (1, 16)
    assert call.inputs.decoder_inputs["mask"].sum() == 2
    assert call.capacity == out.past_key_values.cache.capacity


@pytest.mark.ci
def test_a_handle_serves_more_than_one_call():
    model, ids = tiny.cached("gpt2"), np.array(turns(0, 5, 5))
    out = jaxllm.generate(model, ids, max_new_tokens=3, return_past_key_values=True, **NO_EOS)
    for seed in (1, 2):
        more = np.concatenate([out.sequences, turns(seed, 2, 2)], axis=1)
        expected = jaxllm.generate(model, more, max_new_tokens=3, **NO_EOS)
        actual = jaxllm.generate(
            model, more, max_new_tokens=3, past_key_values=out.past_key_values, **NO_EOS
        )
        np.testing.assert_array_equal(actual.sequences, expected.sequences)


@pytest.mark.ci
def test_the_cache_grows():
    model, ids = tiny.cached("llama"), np.array(turns(0, 5))
    out = jaxllm.generate(model, ids, max_new_tokens=3, return_past_key_values=True, **NO_EOS)
    assert out.past_key_values.cache.capacity == 32
    more = np.concatenate([out.sequences, turns(1, 20)], axis=1)
    settings = {"max_new_tokens": 30, **NO_EOS}
    expected = jaxllm.generate(model, more, **settings)
    out = jaxllm.generate(
        model,
        more,
        past_key_values=out.past_key_values,
        return_past_key_values=True,
        **settings,
    )
    np.testing.assert_array_equal(out.sequences, expected.sequences)
    assert out.past_key_values.cache.capacity == 64


@pytest.mark.slow
def test_samples_continue_each_on_its_own():
    model, ids = tiny.cached("gpt2"), np.array(turns(0, 5, 5))
    settings = {"max_new_tokens": 3, "do_sample": True, "key": 3, **NO_EOS}
    out = jaxllm.generate(
        model, ids, num_return_sequences=2, return_past_key_values=True, **settings
    )
    more = np.concatenate([out.sequences, turns(1, 2, 2, 2, 2)], axis=1)
    expected = jaxllm.generate(model, more, **settings)
    actual = jaxllm.generate(model, more, past_key_values=out.past_key_values, **settings)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)


@pytest.mark.slow
def test_token_types_continue():
    model, ids = tiny.cached("gpt2"), np.array(turns(0, 5))
    types = np.full((1, 5), 7)
    settings = {"max_new_tokens": 3, "output_scores": True, **NO_EOS}
    out = jaxllm.generate(model, ids, token_type_ids=types, return_past_key_values=True, **settings)
    more = np.concatenate([out.sequences, turns(1, 2)], axis=1)
    types = np.array([[7] * 8 + [9] * 2])
    expected = jaxllm.generate(model, more, token_type_ids=types, **settings)
    actual = jaxllm.generate(
        model, more, token_type_ids=types, past_key_values=out.past_key_values, **settings
    )
    np.testing.assert_array_equal(actual.sequences, expected.sequences)
    np.testing.assert_allclose(actual.scores[2], expected.scores[2], atol=2e-4)


@pytest.mark.ci
def test_the_conversation_must_begin_with_what_is_held():
    model, (ids, mask) = tiny.cached("llama"), padded(turns(0, 3, 5))
    out = jaxllm.generate(model, ids, mask, max_new_tokens=3, return_past_key_values=True, **NO_EOS)
    past = out.past_key_values
    more, seen = (np.pad(x, ((0, 0), (0, 1)), constant_values=1) for x in (out.sequences, mask))
    seen = np.pad(seen, ((0, 0), (0, 3)), constant_values=1)
    changed = more.copy()
    changed[0, 4] = changed[0, 4] + 1 if changed[0, 4] < 40 else 3
    settings = {"past_key_values": past, "max_new_tokens": 2, **NO_EOS}
    with pytest.raises(InputError, match=r"input_ids\[0, 4\]: .* as token 2 of this row"):
        jaxllm.generate(model, changed, seen, **settings)
    with pytest.raises(InputError, match="row 0 has 5 tokens, of which past_key_values holds 5"):
        jaxllm.generate(model, more[:, :7], seen[:, :7], **settings)
    with pytest.raises(InputError, match="1 rows, but past_key_values has 2"):
        jaxllm.generate(model, more[:1], seen[:1], **settings)
    with pytest.raises(InputError, match="of another config"):
        jaxllm.generate(tiny.cached("gpt2"), more, seen, **settings)
    with pytest.raises(InputError, match="inputs_embeds: cannot be combined with past_key_values"):
        jaxllm.generate(model, inputs_embeds=np.zeros((2, 3, 32), np.float32), **settings)
    with pytest.raises(InputError, match="past_key_values: expected what an earlier call"):
        jaxllm.generate(model, more, seen, **{**settings, "past_key_values": ((1, 2),)})
    with pytest.raises(InputError, match=r"outside jax\.jit"):
        jax.jit(lambda x: jaxllm.generate(model, x, seen, **settings).sequences)(more)
    with pytest.raises(UnsupportedError, match="contrastive search compares hidden states"):
        jaxllm.generate(model, more, seen, penalty_alpha=0.6, top_k=4, **settings)
    embeds = np.zeros((2, 3, 32), np.float32)
    with pytest.raises(UnsupportedError, match="return_past_key_values: a prompt of inputs_embeds"):
        jaxllm.generate(model, inputs_embeds=embeds, return_past_key_values=True)
    with pytest.raises(InputError, match="return_past_key_values: stream"):
        jaxllm.stream(model, ids, mask, return_past_key_values=True)


@pytest.mark.ci
def test_stream_takes_a_handle_and_the_callers_jit_gives_one():
    model, ids = tiny.cached("llama"), np.array(turns(0, 5))
    settings = {"max_new_tokens": 3, **NO_EOS}
    inside = jax.jit(
        lambda ids: jaxllm.generate(model, ids, return_past_key_values=True, **settings)
    )(ids)
    more = np.concatenate([inside.sequences, turns(1, 2)], axis=1)
    expected = jaxllm.generate(model, more, **settings).sequences[:, more.shape[1] :]
    past = inside.past_key_values
    chunks = list(jaxllm.stream(model, more, past_key_values=past, chunk_size=2, **settings))
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), expected)
    # A clock has the host look at every token; the state it ends with is the last one.
    timed = jaxllm.generate(
        model,
        more,
        past_key_values=past,
        return_past_key_values=True,
        max_time=1e6,
        **settings,
    )
    full = np.asarray(timed.sequences[0])
    np.testing.assert_array_equal(timed.past_key_values.tokens()[0], full[:-1])


@pytest.mark.ci
def test_turns_of_known_buckets_compile_nothing():
    model, ids = tiny.cached("llama"), np.array(turns(0, 17))
    settings = {"max_new_tokens": 3, "return_past_key_values": True, **NO_EOS}
    past, sizes = None, []
    for turn in range(4):
        out = jaxllm.generate(model, ids, past_key_values=past, **settings)
        past, ids = out.past_key_values, np.concatenate([out.sequences, turns(turn, 1)], axis=1)
        sizes.append(program_count(loop.prefill_program) + program_count(loop.decode_program))
    assert sizes[1] == sizes[2] == sizes[3]


@pytest.mark.ci
def test_a_kind_of_cache_that_the_models_file_names():
    """The file decides for the first call; later ones, which do not name it either, go on."""
    settings = GenerationConfig.from_dict({"cache_implementation": "static"})
    net, ids = tiny.cached("llama").with_card(generation_config=settings), np.array(turns(0, 4))
    fields = {"max_new_tokens": 2, "return_past_key_values": True, **NO_EOS}
    past = jaxllm.generate(net, ids, **fields).past_key_values
    more = np.concatenate([past.sequences[:, :6], [[5]]], axis=1)
    out = jaxllm.generate(net, more, past_key_values=past, **fields)
    np.testing.assert_array_equal(out.sequences, jaxllm.generate(net, more, **fields).sequences)
