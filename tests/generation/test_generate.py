"""generate() and stream(): the reference's cases, padding, buckets, retraces, donation, jit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import DATA, cases, model, problems, run
from generation_tools import (
    FAMILIES,
    cache_copies,
    compilations,
    loop_is_in_place,
    prompts,
    started,
)

import jaxllm
from jaxllm.errors import InputError, NonFiniteError, UnsupportedError

# What is not in the loop of greedy search and sampling.
OTHER_MODES = {"beam", "constrained", "contrastive", "dola", "assisted", "group_beam"}
OTHER_MODES |= {"prompt_lookup", "early_exit"}
OTHER_FIELDS = {"guidance_scale", "stop_strings", "token_healing", "num_beams"}


CASES = [
    case
    for case in cases().values()
    if case["mode"] not in OTHER_MODES
    and "prefix_rule" not in case
    and not OTHER_FIELDS & case["generate_kwargs"].keys()
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_conformance(case):
    assert problems(case, run(case, output_scores=True)) == []


def test_number_of_conformance_cases():
    assert len(CASES) == 44


@pytest.mark.parametrize("name", FAMILIES)
def test_left_padded_equals_right_padded_equals_alone(name):
    results = []
    for side in ("left", "right"):
        rows, ids, mask = prompts(name, side=side)
        out = jaxllm.generate(
            model(name), ids, mask, max_new_tokens=9, eos_token_id=None, no_repeat_ngram_size=2
        )
        results.append(out.sequences[:, -9:])
    np.testing.assert_array_equal(*results)
    for row, want in zip(rows, results[0], strict=True):
        alone = jaxllm.generate(
            model(name), row[None], max_new_tokens=9, eos_token_id=None, no_repeat_ngram_size=2
        )
        np.testing.assert_array_equal(alone.sequences[0, -9:], want)


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_equals_uncached(name):
    """Every new token is the argmax of a forward pass over all that came before it."""
    net = model(name)
    _, ids, mask = prompts(name)
    out = jaxllm.generate(net, ids, mask, max_new_tokens=12, eos_token_id=None).sequences
    if net.is_encoder_decoder:
        logits = net(ids, mask, out).logits
        np.testing.assert_array_equal(np.argmax(logits, -1)[:, :-1], out[:, 1:])
    else:
        whole = np.concatenate([mask, np.ones((len(ids), 12), int)], axis=1)
        logits = net(out, whole).logits
        np.testing.assert_array_equal(np.argmax(logits, -1)[:, ids.shape[1] - 1 : -1], out[:, 7:])


@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_seeds_and_lengths_compile_nothing(name):
    net = model(name)

    def run(length, new, seed, **numbers):
        _, ids, mask = prompts(name, (length, 3, 4), seed=seed)
        fields = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "eos_token_id": [5, 6]}
        fields |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 2}
        fields |= {"suppress_tokens": [9], "bad_words_ids": [[7, 8], [10]], **numbers}
        return jaxllm.generate(
            net, ids, mask, do_sample=True, key=seed, max_new_tokens=new, **fields
        )

    assert compilations(lambda: run(7, 9, 0)) != []
    calls = [
        lambda: run(7, 9, 1),
        lambda: run(9, 9, 2),  # another prompt length in the bucket
        lambda: run(7, 15, 3),  # more new tokens, in the bucket
        lambda: run(7, 9, 4, temperature=1.0, top_k=0, top_p=1.0),
        lambda: run(7, 9, 5, eos_token_id=[3, 4, 11, 12], repetition_penalty=1.0),
        lambda: run(7, 9, 6, eos_token_id=None),
        lambda: run(7, 9, 7, no_repeat_ngram_size=2, min_new_tokens=5, suppress_tokens=[1, 2, 3]),
        lambda: run(7, 9, 8, bad_words_ids=[[13, 14], [15]]),
    ]
    for call in calls:
        assert compilations(call) == []


def test_two_models_of_one_config_share_their_programs():
    _, ids, mask = prompts("s_llama")
    first, second = (jaxllm.load(DATA / "models" / "s_llama")[0] for _ in range(2))
    second.generation_config = second.generation_config.replace(pad_token_id=3)
    jaxllm.generate(first, ids, mask, max_new_tokens=4)
    assert compilations(lambda: jaxllm.generate(second, ids, mask, max_new_tokens=4)) == []


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_stream_equals_generate_and_shares_its_programs(name, chunk_size):
    _, ids, mask = prompts(name)
    fields = {"max_new_tokens": 11, "do_sample": True, "key": 3, "eos_token_id": None}
    whole = jaxllm.generate(model(name), ids, mask, **fields).sequences
    chunks = []

    def run():
        chunks.extend(jaxllm.stream(model(name), ids, mask, chunk_size=chunk_size, **fields))

    assert compilations(run) == []
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), whole[:, -11:])
    assert [c.shape[1] for c in chunks[:-1]] == [chunk_size] * (len(chunks) - 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_cache_is_donated_and_updated_in_place(name):
    _, ids, mask = prompts(name)
    assert loop_is_in_place(*started(name, ids, mask, max_new_tokens=40, eos_token_id=None))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_compiled_loop_copies_no_cache(name, batch):
    _, ids, mask = prompts(name, (7, 3, 5)[:batch])
    # The prediction: one token's worth of keys moves, never a layer's cache.
    assert cache_copies(*started(name, ids, mask, max_new_tokens=80, do_sample=True)) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_inside_the_callers_jit(name):
    net = model(name)
    _, ids, mask = prompts(name)

    @jax.jit
    def call(net, ids, mask, key, temperature):
        return jaxllm.generate(
            net, ids, mask, key=key, max_new_tokens=8, do_sample=True, temperature=temperature
        ).sequences

    got = call(net, ids, mask, jax.random.key(5), 0.8)
    want = jaxllm.generate(
        net, ids, mask, key=jax.random.key(5), max_new_tokens=8, do_sample=True, temperature=0.8
    ).sequences
    np.testing.assert_array_equal(np.asarray(got)[:, : want.shape[1]], want)


def test_a_model_that_the_callers_jit_closes_over():
    net = model("s_llama")
    padded = np.array([[0, 0, 5, 6], [9, 8, 7, 6]])  # whose mask is inferred, there as here

    @jax.jit
    def call(ids):
        return jaxllm.generate(net, ids, max_new_tokens=5, eos_token_id=2).sequences

    want = jaxllm.generate(net, padded, max_new_tokens=5, eos_token_id=2).sequences
    np.testing.assert_array_equal(np.asarray(call(padded))[:, : want.shape[1]], want)


def test_every_form_of_key():
    fields = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": None, "top_k": 0}
    forms = [3, np.int64(3), jnp.int32(3), jax.random.key(3), jax.random.PRNGKey(3)]
    runs = [jaxllm.generate(model("s_llama"), [[5, 6]], key=k, **fields).sequences for k in forms]
    for other in runs[1:]:
        np.testing.assert_array_equal(other, runs[0])
    under_jit = jax.jit(
        lambda key: jaxllm.generate(model("s_llama"), [[5, 6]], key=key, **fields).sequences
    )
    np.testing.assert_array_equal(under_jit(jax.random.key(3)), runs[0])
    np.testing.assert_array_equal(under_jit(jnp.int32(3)), runs[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_64_bit_mode(name):
    _, ids, mask = prompts(name)
    want = jaxllm.generate(model(name), ids, mask, max_new_tokens=5).sequences
    with jax.enable_x64(True):
        got = jaxllm.generate(model(name), ids, mask, max_new_tokens=5).sequences
    np.testing.assert_array_equal(got, want)


def test_min_length_counts_the_embedded_prompt():
    """As in transformers, which subtracts it from both lengths."""
    net = model("s_llama")
    embeds = np.asarray(net.backbone.embed.weight[...])[None, [5, 6, 7, 8]]
    free = jaxllm.generate(net, inputs_embeds=embeds, max_new_tokens=8, eos_token_id=None)
    stop = int(free.sequences[0, 4])
    fields = {"max_new_tokens": 8, "eos_token_id": stop}
    short = jaxllm.generate(net, inputs_embeds=embeds, min_length=5, **fields).sequences
    first = int(np.flatnonzero(free.sequences[0] == stop)[0])
    assert short.shape[1] == first + 1


def test_sampling_inside_jit_needs_a_key():
    _, ids, _ = prompts("s_llama")
    call = jax.jit(lambda net, ids: jaxllm.generate(net, ids, max_new_tokens=2, do_sample=True))
    with pytest.raises(InputError, match="key"):
        call(model("s_llama"), ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rows_sample_depends_on_its_key_and_id_only(name):
    net, fields = model(name), {"do_sample": True, "max_new_tokens": 10, "eos_token_id": None}
    rows, ids, mask = prompts(name)
    batch = jaxllm.generate(net, ids, mask, key=7, **fields).sequences[:, -10:]
    for i, row in enumerate(rows):
        alone = jaxllm.generate(net, row[None], key=7, row_ids=[i], **fields).sequences[0, -10:]
        np.testing.assert_array_equal(alone, batch[i])
    other = jaxllm.generate(net, ids, mask, key=8, **fields).sequences[:, -10:]
    assert (other != batch).any()


def test_samples_differ_by_default_and_repeat_by_key():
    _, ids, _ = prompts("s_llama", (7,))
    fields = {"do_sample": True, "max_new_tokens": 16, "eos_token_id": None, "top_k": 0}
    first, second = (jaxllm.generate(model("s_llama"), ids, **fields).sequences for _ in range(2))
    assert (first != second).any()
    runs = [jaxllm.generate(model("s_llama"), ids, key=1, **fields).sequences for _ in range(2)]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("name", ["s_llama", "s_t5_gated"])
def test_num_return_sequences(name):
    _, ids, mask = prompts(name)
    fields = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "top_k": 0}
    out = jaxllm.generate(model(name), ids, mask, key=2, num_return_sequences=3, **fields)
    assert out.sequences.shape[0] == 9
    one = jaxllm.generate(model(name), ids, mask, key=2, **fields).sequences
    np.testing.assert_array_equal(out.sequences[::3], one)
    assert (out.sequences[0] != out.sequences[1]).any()


def test_finished_rows_emit_pad_and_length_is_the_longest_row():
    _, ids, mask = prompts("s_llama")
    free = jaxllm.generate(model("s_llama"), ids, mask, max_new_tokens=12, eos_token_id=None)
    stop = int(free.sequences[0, 9])  # row 0's third new token
    out = jaxllm.generate(
        model("s_llama"), ids, mask, max_new_tokens=12, eos_token_id=stop, pad_token_id=77
    ).sequences
    ends = [np.flatnonzero(row[7:] == stop) for row in out]
    for row, end, unstopped in zip(out, ends, free.sequences, strict=True):
        last = 7 + (end[0] if end.size else 11)
        np.testing.assert_array_equal(row[: last + 1], unstopped[: last + 1])
        assert (row[last + 1 :] == 77).all()
    assert out.shape[1] == 7 + max((e[0] + 1) if e.size else 12 for e in ends)


def test_end_tokens_of_all_files_count_unless_one_is_named():
    net = jaxllm.load(DATA / "models" / "s_llama")[0]
    _, ids, _ = prompts("s_llama", (7,))
    free = jaxllm.generate(net, ids, max_new_tokens=8, eos_token_id=None).sequences[0, 7:]
    net.extra_eos = (int(free[4]),)
    cut = jaxllm.generate(net, ids, max_new_tokens=8).sequences[0, 7:]
    first = int(np.flatnonzero(free == free[4])[0])
    np.testing.assert_array_equal(cut, free[: first + 1])
    named = jaxllm.generate(net, ids, max_new_tokens=8, eos_token_id=2).sequences[0, 7:]
    assert len(named) == 8 or named[-1] == 2


def test_processors_of_the_caller():
    """A callable and a pytree, in HF's Flax calling convention."""
    _, ids, mask = prompts("s_llama")

    def only_even(input_ids, scores, cur_len):
        return jnp.where(jnp.arange(scores.shape[-1]) % 2 == 0, scores, -jnp.inf)

    out = jaxllm.generate(
        model("s_llama"), ids, mask, max_new_tokens=8, logits_processor=[only_even]
    ).sequences
    assert (out[:, 7:] % 2 == 0).all()


def test_non_finite_logits_name_step_and_row():
    net = jaxllm.load(DATA / "models" / "s_llama")[0]
    free = jaxllm.generate(net, [[5, 6, 7]], max_new_tokens=6, eos_token_id=None).sequences[0]
    table = np.array(net.backbone.embed.weight[...])
    table[free[5]] = np.nan  # the third new token: its own step's logits are fine, the next are not
    net.backbone.embed.weight[...] = jnp.asarray(table)
    with pytest.raises(NonFiniteError, match=r"new token \d+ of row 0"):
        jaxllm.generate(net, [[5, 6, 7]], max_new_tokens=6, eos_token_id=None)


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


def test_what_stream_cannot_give_is_named():
    for fields in ({"chunk_size": 2.5}, {"chunk_size": 0}, {"output_scores": True}):
        with pytest.raises(InputError, match=next(iter(fields))):
            next(jaxllm.stream(model("s_llama"), [[5]], **fields))
    settings = jaxllm.GenerationConfig(output_logits=True)
    with pytest.raises(InputError, match="output_logits"):
        next(jaxllm.stream(model("s_llama"), [[5]], generation_config=settings))


def test_a_step_with_every_token_forbidden_is_an_error():
    with pytest.raises(NonFiniteError, match="forbid every token"):
        jaxllm.generate(model("s_llama"), [[5]], suppress_tokens=list(range(131)))


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


def test_t5_encoder_outputs_and_embeddings_stand_in_for_ids():
    net = model("s_t5_gated")
    _, ids, mask = prompts("s_t5_gated", side="right")
    fields = {"max_new_tokens": 8, "eos_token_id": None}
    want = jaxllm.generate(net, ids, mask, **fields).sequences
    encoded = net(ids, mask, [[0]] * 3).encoder_last_hidden_state
    got = jaxllm.generate(net, None, mask, encoder_outputs=encoded, **fields).sequences
    np.testing.assert_array_equal(got, want)
    embeds = net.shared(jnp.asarray(ids))
    got = jaxllm.generate(net, None, mask, inputs_embeds=embeds, **fields).sequences
    np.testing.assert_array_equal(got, want)


def test_decoder_prompts_of_t5_do_not_depend_on_their_padding():
    net = model("s_t5_gated")
    fields = {"max_new_tokens": 6, "eos_token_id": None}
    source = [[5, 6, 7]]
    alone = jaxllm.generate(net, source, decoder_input_ids=[[9, 8]], **fields).sequences
    assert alone[0, :3].tolist() == [0, 9, 8]
    padded = jaxllm.generate(
        net,
        source * 2,
        decoder_input_ids=[[0, 0, 9, 8], [11, 12, 13, 14]],
        decoder_attention_mask=[[0, 0, 1, 1], [1, 1, 1, 1]],
        **fields,
    ).sequences
    np.testing.assert_array_equal(padded[0, 2:], alone[0])
    states = np.zeros((1, 3, net.config.d_model), np.float32)
    with pytest.raises(InputError, match="inputs_embeds"):
        jaxllm.generate(net, inputs_embeds=states, encoder_outputs=states, **fields)
    with pytest.raises(InputError, match="token_type_ids"):
        jaxllm.generate(net, source, token_type_ids=[[0, 0, 0]], **fields)


@jax.jit
def best_tokens(net, ids, mask, decoder_ids):
    """Argmax at every position of one uncached forward pass."""
    inputs = (ids, mask, decoder_ids) if net.is_encoder_decoder else (ids, mask)
    return jnp.argmax(net(*inputs).logits, axis=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_lengths_equal_an_uncached_pass(name):
    """Bucketed == exact, for 60 random pairs of prompt length and new tokens."""
    net, rng = model(name), np.random.default_rng(1)
    for _ in range(60):
        length, new = int(rng.integers(1, 30)), int(rng.integers(1, 20))
        ids = rng.integers(3, net.config.vocab_size - 1, (1, length))
        out = jaxllm.generate(net, ids, max_new_tokens=new, eos_token_id=None).sequences
        whole = np.pad(ids if net.is_encoder_decoder else out, ((0, 0), (0, 64)))[:, :64]
        real = np.arange(64) < (length if net.is_encoder_decoder else out.shape[1])
        decoder = np.pad(out, ((0, 0), (0, 64)))[:, :32]
        best = np.asarray(best_tokens(net, whole, real[None], decoder))[0]
        first = 0 if net.is_encoder_decoder else length - 1
        np.testing.assert_array_equal(best[first : first + new], out[0, -new:])


def test_settings_are_a_pytree_of_numbers():
    _, ids, mask = prompts("s_llama")
    _, call, _ = started("s_llama", ids, mask, do_sample=True, temperature=0.5)
    leaves = jax.tree.leaves(call.settings)
    assert all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves)
    assert dataclasses.is_dataclass(call.settings)
