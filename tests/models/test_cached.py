"""Decoding on top of a cache gives what one call over the whole text gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from parity_data import load_case
from parity_runs import model_of

from jaxllm.common.errors import InputError

pytestmark = pytest.mark.usefixtures("highest_precision")

# A prompt of 4 columns, then one token, one token, and four at once.
CHUNKS = (slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 10))
MASK = np.ones((2, 10), bool)
MASK[0, :3] = False  # left padding
MASK[1, 4:6] = False  # pads in the middle: the end of a shorter prompt, and a finished step


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_forward_with_a_cache(family):
    model, ids = tiny.cached(family), tiny.ids(2, 10)
    full = tiny.logits(model, ids, attention_mask=MASK)
    cache = model.init_cache(2, 12)
    for columns in CHUNKS:
        out = model(ids[:, columns], MASK[:, columns], cache=cache)
        cache, real = out.cache, MASK[:, columns]
        np.testing.assert_allclose(out.logits[real], full[:, columns][real], atol=2e-5)
    assert int(cache.length) == 10
    assert cache.next_position.tolist() == [7, 8]
    with pytest.raises(InputError, match="cache: 12 columns, of which 10 are in use; 3 more"):
        model(ids[:, :3], cache=cache)
    with pytest.raises(InputError, match="cache: holds 2 rows, but the call has 1"):
        model(ids[:1, :1], cache=cache)


@pytest.mark.by_default("gpt2-False")
@pytest.mark.parametrize("cache_is_empty", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        *tiny.FAMILIES,
        "qwen3",
        "bloom",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("mistral", "qwen2", "phi3", "gemma", "gemma3_text", "cohere", "t5gemma")
        ),
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("opt", "gpt_neo", "gptj")),
    ],
)
def test_decode(family, cache_is_empty):
    """The protocol of generation. `cache_is_empty` prefill looks at its own columns only."""
    model, ids = tiny.cached(family), tiny.ids(2, 10)
    if model.is_encoder_decoder:
        source, source_mask = tiny.ids(2, 6, seed=1), np.arange(6)[None] < [[6], [4]]
        full = tiny.logits(
            model,
            source,
            attention_mask=source_mask,
            decoder_input_ids=ids,
            decoder_attention_mask=MASK,
        )
        cache = model.init_cache(2, 12, input_ids=source, attention_mask=source_mask)
    else:
        full = tiny.logits(model, ids, attention_mask=MASK)
        cache = model.init_cache(2, 12)
    scale = max(1, full.std())
    decode = jax.jit(model.decode, static_argnames="cache_is_empty")
    for columns in CHUNKS:
        real = MASK[:, columns]
        first = cache_is_empty and columns.start == 0
        read = decode(jnp.asarray(ids[:, columns]), real, cache, cache_is_empty=first)
        cache = read.cache
        np.testing.assert_allclose(read.logits[real], full[:, columns][real], atol=2e-5 * scale)


@pytest.mark.ci
def test_gpt2_positions_end_with_the_cache_too():
    model = tiny.make("gpt2", n_positions=8)
    cache = model(tiny.ids(1, 6), cache=model.init_cache(1, 16)).cache
    with pytest.raises(InputError, match="9 tokens, but this model has 8 positions"):
        model(tiny.ids(1, 3), cache=cache)


@pytest.mark.ci
def test_cross_attention_and_token_types_stay_in_the_cache():
    model = model_of("gpt2_cross")
    states = load_case("gpt2_cross").calls["plain"].inputs["encoder_hidden_states"]
    ids, types = tiny.ids(len(states), 6, vocab=20), tiny.ids(len(states), 6, seed=1, vocab=20)
    types[:, 4:] = types[:, 3:4]  # new tokens take the type of the prompt's last
    full = model(ids, token_type_ids=types, encoder_hidden_states=states).logits
    cache = model.init_cache(len(ids), 8, encoder_hidden_states=states)
    mask = jnp.ones((len(ids), 4), bool)
    read = model.decode(
        jnp.asarray(ids[:, :4]), mask, cache, token_type_ids=jnp.asarray(types[:, :4])
    )
    np.testing.assert_allclose(read.logits, full[:, :4], atol=1e-4)
    read = model.decode(jnp.asarray(ids[:, 4:]), mask[:, :2], read.cache)
    np.testing.assert_allclose(read.logits, full[:, 4:], atol=1e-4)


@pytest.mark.by_default("bart")
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_decode_loop_by_hand(family):
    """`init_cache` and a call with `cache=` for each token give what `generate` gives."""
    model, ids = tiny.cached(family), tiny.ids(2, 6)
    settings = {"max_new_tokens": 5, "eos_token_id": None, "do_sample": False}
    expected = model.generate(ids, **settings).sequences[:, -5:]
    name, tokens, source = "input_ids", ids, {}
    if model.is_encoder_decoder:
        start = model.config.decoder_start_token_id
        name, tokens, source = "decoder_input_ids", np.full((2, 1), start), {"input_ids": ids}
    cache, found = model.init_cache(2, 12, **source), []
    for _ in range(5):
        out = model(**{name: tokens}, cache=cache, logits_to_keep=1)
        cache, tokens = out.cache, np.asarray(out.logits.argmax(-1))
        found.append(tokens[:, 0])
    np.testing.assert_array_equal(np.stack(found, axis=1), expected)


def test_what_a_cached_call_of_an_encoder_decoder_refuses():
    model, ids = tiny.cached("t5"), tiny.ids(2, 3)
    cache = model.init_cache(2, 4, input_ids=ids)
    for name, value in (("input_ids", ids), ("labels", ids), ("dropout_key", jax.random.key(0))):
        with pytest.raises(InputError, match=f"^{name}: .* cache"):
            model(**{"decoder_input_ids": ids, name: value}, cache=cache)
    out = model(decoder_input_ids=ids, cache=cache)
    with pytest.raises(InputError, match="4 columns, of which 3 are in use; 3 more do not fit"):
        model(decoder_input_ids=ids, cache=out.cache)
    with pytest.raises(InputError, match="needs the encoder's input"):
        model.init_cache(2, 4)
