"""Kinds of caches: in 8 bits, a sliding window, and how many slots."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny
from compiling import program_count
from generation_tools import NO_EOS, banded, padded, turns

import jaxllm
from jaxllm.cache.kv_cache import KV
from jaxllm.cache.variants import QuantizedKV
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation import GenerationConfig, loop
from jaxllm.generation.generate import prepare_call

QUANTIZED = {"cache_implementation": "quantized", "cache_config": {"nbits": 8}}


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_eight_bits(family):
    """The same tokens, scores that are close but not equal, and a fraction of the bytes."""
    model = tiny.cached(family)
    ids, mask = padded(turns(0, 9, 4))
    settings = {"max_new_tokens": 12, "output_scores": True, "return_past_key_values": True}
    settings.update(NO_EOS)
    full = jaxllm.generate(model, ids, mask, **settings)
    small = jaxllm.generate(model, ids, mask, **settings, **QUANTIZED)
    np.testing.assert_array_equal(small.sequences, full.sequences)
    error = np.std(np.stack(small.scores) - np.stack(full.scores))
    assert 1e-5 < error < 0.05 * np.std(np.stack(full.scores))
    # The prompt reads its keys and values before they are rounded.
    np.testing.assert_allclose(small.scores[0], full.scores[0], atol=1e-5)

    def own(out):
        return sum(x.nbytes for x in jax.tree.leaves(out.past_key_values.cache.layers))

    size = 8  # of a head: 8 bytes and a scale of 4, in place of 8 floats
    assert own(small) / own(full) == (size + 4) / (4 * size)


@pytest.mark.slow
def test_eight_bits_continue_and_take_beams():
    model, ids = tiny.cached("llama"), np.array(turns(0, 6))
    settings = {"max_new_tokens": 4, **NO_EOS}
    out = jaxllm.generate(model, ids, return_past_key_values=True, **settings, **QUANTIZED)
    past = out.past_key_values
    more = np.concatenate([out.sequences, turns(1, 3)], axis=1)
    expected = jaxllm.generate(model, more, **settings)
    actual = jaxllm.generate(model, more, past_key_values=past, **settings)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)
    with pytest.raises(InputError, match="cache_implementation: past_key_values has a kind"):
        jaxllm.generate(model, more, past_key_values=past, **settings, **QUANTIZED)
    beams = {"num_beams": 2, **settings}
    expected = jaxllm.generate(model, ids, **beams)
    actual = jaxllm.generate(model, ids, **beams, **QUANTIZED)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)
    np.testing.assert_allclose(actual.sequences_scores, expected.sequences_scores, atol=0.05)
    contrastive = {"penalty_alpha": 0.4, "top_k": 3, **settings}
    expected = jaxllm.generate(model, ids, **contrastive)
    actual = jaxllm.generate(model, ids, **contrastive, **QUANTIZED)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)


@pytest.mark.ci
def test_quantization_error_is_at_most_half_a_step():
    x = np.random.default_rng(0).standard_normal((3, 5, 2, 8)).astype(np.float32)
    x[1, 2, 1] = 0
    kv = QuantizedKV.like(KV.zeros(3, 5, 2, 8, np.float32)).write(x, 2 * x, np.int32(0))
    for actual, expected in ((kv.dequantized().k, x), (kv.dequantized().v, 2 * x)):
        expected = expected.transpose(0, 2, 1, 3).reshape(6, 5, 8)
        step = np.abs(expected).max(-1, keepdims=True) / 127
        assert (np.abs(actual - expected) <= step / 2 + 1e-6).all()
    q = x[:, 0].reshape(6, 1, 8)
    np.testing.assert_allclose(kv.scores(q), kv.dequantized().scores(q), atol=1e-4)
    weights = np.random.default_rng(1).random((6, 1, 5)).astype(np.float32)
    np.testing.assert_allclose(
        kv.weighted_values(weights), kv.dequantized().weighted_values(weights), atol=1e-4
    )


@pytest.mark.ci
@pytest.mark.parametrize(("family", "side"), [("llama", "left"), ("gpt2", "right"), ("t5", "left")])
@pytest.mark.parametrize("window", [3, 16])
def test_a_window_is_a_band_of_the_mask(family, side, window):
    """Prompts shorter and longer than the window, and more tokens than the ring has slots."""
    model, rows = tiny.cached(family), turns(0, 2, 21)
    ids, mask = padded(rows, side)
    settings = {"max_new_tokens": 20, "output_scores": True, **NO_EOS}
    settings.update(cache_implementation="sliding_window", cache_config={"sliding_window": window})
    out = jaxllm.generate(model, ids, mask, **settings)
    new = np.asarray(out.sequences)[:, -20:].tolist()
    for i, row in enumerate(rows):
        if family == "t5":
            expected = banded(model, [0, *new[i][:-1]], window, source=row)
        else:
            expected = banded(model, row + new[i][:-1], window)[len(row) - 1 :]
        np.testing.assert_allclose(np.stack(out.scores)[:, i], expected, atol=3e-4)


@pytest.mark.ci
def test_a_window_of_everything_is_no_window_and_another_compiles_nothing():
    model, ids = tiny.cached("llama"), np.array(turns(0, 5))
    settings = {"max_new_tokens": 8, **NO_EOS}
    full = jaxllm.generate(model, ids, **settings)
    settings["cache_implementation"] = "sliding_window"
    wide = jaxllm.generate(model, ids, cache_config={"sliding_window": 16}, **settings)
    np.testing.assert_array_equal(wide.sequences, full.sequences)
    size = program_count(loop.decode_program)
    narrow = jaxllm.generate(model, ids, cache_config={"sliding_window": 2}, **settings)
    assert program_count(loop.decode_program) == size
    assert (narrow.sequences != full.sequences).any()


@pytest.mark.ci
def test_no_tile_of_slots_is_allocated_that_a_call_does_not_need(monkeypatch):
    model, ids = tiny.cached("llama"), np.array(turns(0, 5))
    settings = {"max_new_tokens": 40, **NO_EOS}
    call = prepare_call(model, ids, None, None, None, settings)
    expected = jaxllm.generate(model, ids, **settings)
    monkeypatch.setattr(type(model), "cache_slot_tile", 16)
    tiled = prepare_call(model, ids, None, None, None, settings)
    width = call.capacity - call.request.new_token_bucket
    assert (call.capacity, tiled.capacity) == (width + 64, 64)
    out = jaxllm.generate(model, ids, **settings)
    np.testing.assert_array_equal(out.sequences, expected.sequences)


def test_the_ring_holds_no_more_than_the_window():
    model, ids = tiny.cached("llama"), np.array(turns(0, 30))
    fields = {"cache_implementation": "sliding_window", "cache_config": {"sliding_window": 7}}
    call = prepare_call(model, ids, None, None, None, {"max_new_tokens": 30, **fields})
    assert call.capacity == 16


@pytest.mark.ci
def test_static_dynamic_and_a_length():
    model, ids = tiny.cached("llama"), np.array(turns(0, 5))
    settings = {"max_new_tokens": 4, **NO_EOS}
    expected = jaxllm.generate(model, ids, **settings).sequences
    for name in ("static", "dynamic"):
        out = jaxllm.generate(model, ids, cache_implementation=name, **settings)
        np.testing.assert_array_equal(out.sequences, expected)
    out = jaxllm.generate(model, ids, max_cache_len=50, return_past_key_values=True, **settings)
    np.testing.assert_array_equal(out.sequences, expected)
    assert out.past_key_values.cache.capacity == 50
    jaxllm.generate(model, ids, max_cache_len=9, **settings)
    with pytest.raises(InputError, match="max_cache_len: 8 slots, but this call needs 9"):
        jaxllm.generate(model, ids, max_cache_len=8, **settings)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"cache_implementation": "offloaded"}, UnsupportedError, "`cache_implementation`='offl"),
        ({"cache_implementation": "paged"}, UnsupportedError, "`cache_implementation`='paged'"),
        ({"cache_implementation": "quantized"}, UnsupportedError, "nbits=None is not supported"),
        (QUANTIZED | {"cache_config": {"nbits": 4}}, UnsupportedError, "nbits=4 is not"),
        (
            QUANTIZED | {"cache_config": {"nbits": 8, "backend": "HQQ"}},
            UnsupportedError,
            "backend='HQQ' is not supported",
        ),
        ({"cache_config": {"nbits": 8}}, InputError, "'nbits' has no effect with"),
        ({"cache_implementation": "sliding_window"}, InputError, "needs .* the number of tokens"),
        (
            {"cache_implementation": "sliding_window", "cache_config": {"sliding_window": 0}},
            InputError,
            "`sliding_window` must be an integer of at least 1",
        ),
    ],
)
def test_what_a_cache_cannot_be(fields, error, message):
    with pytest.raises(error, match=message):
        jaxllm.generate(tiny.cached("llama"), np.array([[3, 4]]), **fields)


@pytest.mark.parametrize("name", ["sliding_window", "quantized", "offloaded", "hybrid"])
def test_a_kind_of_cache_in_a_file_is_no_error(name):
    """It says how to compute, not what: without its options the cache is the plain one."""
    model, ids = tiny.cached("llama"), np.array([[3, 4]])
    settings = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    expected = jaxllm.generate(model, ids, **settings).sequences
    file = GenerationConfig.from_dict({"cache_implementation": name, "cache_config": {"nbits": 4}})
    actual = jaxllm.generate(model, ids, generation_config=file, **settings).sequences
    np.testing.assert_array_equal(actual, expected)


def test_a_window_has_a_length_of_its_own():
    fields = {"cache_implementation": "sliding_window", "cache_config": {"sliding_window": 4}}
    with pytest.raises(InputError, match="max_cache_len has no effect on a sliding window"):
        jaxllm.generate(tiny.cached("llama"), np.array([[3, 4]]), max_cache_len=99, **fields)
