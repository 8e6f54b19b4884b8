"""Assisted generation: equal to greedy search, distributed as sampling, and cheaper in calls."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import compiled_as_users
from conformance_runs import model
from generation_tools import DRAFTS, compilations, drafts, repeating_prompts, started

import jaxllm
from jaxllm.generation import HostCriteria
from jaxllm.generation.loop import decode_program
from jaxllm.generation.processors import HostLogitsProcessor

SLOW = pytest.mark.slow

RULES = {"max_new_tokens": 14, "eos_token_id": [5, 9, 31], "min_new_tokens": 4, "pad_token_id": 0}
RULES |= {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4}


@functools.cache
def greedy(name: str, seed: int, side="left"):
    """Greedy search of ten ragged rows, and how many columns of each rounding cannot change."""
    ids, mask = repeating_prompts(10, seed, side)
    out = jaxllm.generate(model(name), ids, mask, **RULES, output_scores=True)
    top = np.sort(np.stack(out.scores, axis=1))[..., -2:]
    close = np.cumsum(top[..., 1] - top[..., 0] < 1e-4, axis=1)
    return ids, mask, out.sequences, out.sequences.shape[1] - (close > 0).sum(axis=1)


def assert_greedy(name: str, draft: dict, seed: int, side="left"):
    ids, mask, reference, sure = greedy(name, seed, side)
    assert (sure == reference.shape[1]).sum() >= 9
    out = jaxllm.generate(model(name), ids, mask, **RULES, **draft)
    for row, expected, upto in zip(out.sequences, reference, sure, strict=True):
        np.testing.assert_array_equal(row[:upto], expected[:upto])
    return out.assisted


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["s_llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("s_gpt2", "s_t5"))]
)
def test_fifty_prompts_equal_greedy_search(name):
    """In ragged batches, with processors that act on each position, and end tokens."""
    drafted = accepted = 0
    for seed in range(5):
        counts = assert_greedy(name, drafts(name)["assistant"], seed)
        drafted += counts.drafted.sum()
        accepted += counts.accepted.sum()
    print(f"{name}: {accepted} of {drafted} drafted tokens accepted")  # shown by pytest -rP
    assert 0 < accepted < drafted


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("s_llama", "early exit"),
        ("s_llama", "lookup"),
        ("s_t5", "early exit"),
        pytest.param("s_t5", "lookup", marks=pytest.mark.slow),
        pytest.param("s_gpt2", "early exit", marks=pytest.mark.slow),
        pytest.param("s_gpt2", "lookup", marks=pytest.mark.slow),
    ],
)
def test_other_drafts_equal_greedy_search(name, kind):
    for side in ("left", "right"):
        counts = assert_greedy(name, drafts(name)[kind], 0, side)
        assert (counts.accepted <= counts.drafted).all()
    assert counts.drafted.sum() > 0


@pytest.mark.ci
def test_numbers_compile_nothing():
    net, draft = model("s_llama"), model("s_llama_draft")

    def run(seed=0, new=12, **changes):
        ids, mask = repeating_prompts(seed=seed)
        fields = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.2}
        fields |= {"eos_token_id": None, "max_new_tokens": new, "assistant_model": draft}
        jaxllm.generate(net, ids, mask, **{**fields, **changes})

    def make_view(**changes):
        fields = {"assistant_model": None, "num_assistant_tokens": None}
        fields |= {"assistant_confidence_threshold": None, "prompt_lookup_num_tokens": 4}
        run(**{**fields, "max_matching_ngram_size": 2, **changes})

    jax.clear_caches()
    assert compilations(run) != []
    make_view()
    calls = [
        lambda: run(1, 16),
        lambda: run(num_assistant_tokens=8),
        lambda: run(num_assistant_tokens=1, assistant_confidence_threshold=0.9),
        lambda: run(num_assistant_tokens=2, num_assistant_tokens_schedule="heuristic"),
        lambda: run(eos_token_id=[5, 6]),
        lambda: make_view(prompt_lookup_num_tokens=7),
        lambda: make_view(max_matching_ngram_size=5),
    ]
    for call in calls:
        assert compilations(call) == []
    run(assistant_ensemble_weight=0.4)
    assert compilations(lambda: run(assistant_ensemble_weight=0.7)) == []


@pytest.mark.ci
@pytest.mark.parametrize("kind", DRAFTS)
def test_stream_equals_generate_and_shares_its_programs(kind):
    ids, mask = repeating_prompts()
    fields = {"max_new_tokens": 12, "eos_token_id": [31], **drafts("s_llama")[kind]}
    full = jaxllm.generate(model("s_llama"), ids, mask, **fields).sequences
    for chunk_size in (1, 4):
        chunks = []

        def run(chunk_size=chunk_size, chunks=chunks):
            calls = jaxllm.stream(model("s_llama"), ids, mask, chunk_size=chunk_size, **fields)
            chunks.extend(calls)

        assert compilations(run) == []
        np.testing.assert_array_equal(np.concatenate(chunks, axis=1), full[:, ids.shape[1] :])
        assert all(chunk.shape[1] <= chunk_size for chunk in chunks)


@pytest.mark.ci
def test_scores_and_logits_are_those_of_greedy_search():
    ids, mask = repeating_prompts()
    fields = {"max_new_tokens": 12, "eos_token_id": None, "repetition_penalty": 1.2}
    fields |= {"output_scores": True, "output_logits": True}
    expected = jaxllm.generate(model("s_llama"), ids, mask, **fields)
    actual = jaxllm.generate(
        model("s_llama"), ids, mask, **fields, **drafts("s_llama")["assistant"]
    )
    for name in ("scores", "logits"):
        ours, theirs = np.stack(getattr(actual, name)), np.stack(getattr(expected, name))
        assert ours.shape == (12, 3, 131)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "batch", "kind"),
    [
        ("s_llama", 1, "assistant"),
        pytest.param("s_llama", 3, "early exit", marks=pytest.mark.slow),
        ("s_t5", 3, "assistant"),
    ],
)
def test_caches_are_donated_and_never_copied(name, batch, kind):
    """The prediction: the drafts' columns move, never a layer's cache."""
    ids, mask = repeating_prompts(batch)
    fields = {"max_new_tokens": 80, "eos_token_id": None, **drafts(name)[kind]}
    bare, call, state = started(name, ids, mask, **fields)
    caches = [state.cache] if state.draft is None else [state.cache, state.draft]
    shapes = {cache.layers[0].k.shape for cache in caches}
    arguments = (call.strategy, bare, state, call.settings, np.int32(call.request.max_length))
    compiled = compiled_as_users(decode_program.lower(*arguments))
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", compiled.as_text())
    moved = {tuple(sorted(map(int, dims.split(",")))) for dims in copies}
    assert not moved & {tuple(sorted(shape)) for shape in shapes}

    before = [cache.layers[0].k for cache in caches]
    addresses = [k.unsafe_buffer_pointer() for k in before]
    after = compiled(*arguments)
    caches = [after.cache] if after.draft is None else [after.cache, after.draft]
    assert [cache.layers[0].k.unsafe_buffer_pointer() for cache in caches] == addresses
    assert all(k.is_deleted() for k in before)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(bare))


@pytest.mark.slow
def test_inside_the_callers_jit():
    ids, mask = repeating_prompts()
    fields = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    expected = jaxllm.generate(model("s_llama"), ids, mask, **fields).sequences

    card = model("s_llama_draft").card

    @jax.jit
    def call(net, draft, ids, mask):
        draft = draft.with_card(card)  # settings of a draft come from its generation_config.json
        return jaxllm.generate(
            net, ids, mask, assistant_model=draft, num_assistant_tokens=4, **fields
        )

    out = call(model("s_llama"), model("s_llama_draft"), ids, mask)
    np.testing.assert_array_equal(out.sequences, expected)
    assert out.assisted.target_calls.shape == (3,)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["assistant", "lookup"])
def test_stops_and_functions_of_the_prefix(kind):
    """Each position is held against them, in rows that stop at different columns."""
    ids, mask = repeating_prompts()

    def ends(input_ids, scores, cur_len):
        newest = jnp.take_along_axis(input_ids, jnp.reshape(cur_len, (-1, 1)) - 1, axis=1)
        return (newest % 11 == 3)[:, 0]

    def allowed(batch_id, tokens):
        return [t for t in range(131) if t % 5 != batch_id]

    fields = {"max_new_tokens": 14, "eos_token_id": None, "prefix_allowed_tokens_fn": allowed}
    fields |= {"stopping_criteria": [ends]}

    def plain(input_ids, scores, cur_len):
        return ends(input_ids, scores, jnp.full((input_ids.shape[0],), cur_len))

    expected = jaxllm.generate(
        model("s_llama"), ids, mask, **{**fields, "stopping_criteria": [plain]}
    ).sequences
    actual = jaxllm.generate(model("s_llama"), ids, mask, **fields, **drafts("s_llama")[kind])
    np.testing.assert_array_equal(actual.sequences, expected)
    assert (expected[:, -1] == 0).any()  # some row stopped early


def guided_functions(rows: set[int]) -> dict[str, Any]:
    """Guidance, and functions in plain Python, as `generate` takes them; they note how many rows
    they get at a time."""

    def lowers(input_ids, scores):
        rows.add(len(input_ids))
        scores = scores.copy()
        scores[np.arange(len(scores)), (input_ids[:, -1] + 1) % scores.shape[1]] -= 4
        return scores

    def ends(input_ids, scores):
        rows.add(len(input_ids))
        return input_ids[:, -1] % 11 == 3

    return {
        "guidance_scale": 1.6,
        "negative_prompt_ids": [[5, 9, 6] * 5, [7] * 15, [8] * 15],  # longer than the prompts
        "logits_processor": [HostLogitsProcessor(lowers)],
        "stopping_criteria": [HostCriteria(ends)],
        "max_new_tokens": 14,
        "eos_token_id": None,
    }


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("assistant", {}),
        pytest.param("early exit", {}, marks=SLOW),
        pytest.param("lookup", {}, marks=SLOW),
        pytest.param("lookup", {"do_sample": True, "key": 3}, marks=SLOW),
        pytest.param("assistant", {"num_return_sequences": 2, "do_sample": True}, marks=SLOW),
    ],
)
def test_guidance_and_functions_of_the_host(kind, how):
    """Both contexts read the drafts, and Python functions get each row by itself."""
    ids, mask = repeating_prompts()
    fields = {**guided_functions(rows := set()), **how}
    actual = jaxllm.generate(model("s_gpt2"), ids, mask, **fields, **drafts("s_gpt2")[kind])
    assert actual.assisted is not None
    assert rows == {1}
    if "num_return_sequences" in how:  # other draws than without a draft
        assert actual.sequences.shape[0] == 6
        new = np.asarray(actual.sequences)[:, ids.shape[1] :]
        for row in new:  # nothing follows a token at which a text ends
            ends = np.flatnonzero(row % 11 == 3)
            assert not ends.size or (row[ends[0] + 1 :] == 0).all()
        return
    expected = jaxllm.generate(model("s_gpt2"), ids, mask, **fields)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)
    assert how or actual.assisted.accepted.sum() > 0
    ended = (np.asarray(expected.sequences) % 11 == 3)[:, ids.shape[1] : -1]
    assert ended.any()  # some row stopped early


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTS)
def test_64_bit_mode(kind):
    ids, mask = repeating_prompts()
    fields = {"max_new_tokens": 9, "do_sample": True, "key": 1, **drafts("s_llama")[kind]}
    expected = jaxllm.generate(model("s_llama"), ids, mask, **fields).sequences
    with jax.enable_x64(True):
        actual = jaxllm.generate(model("s_llama"), ids, mask, **fields).sequences
    np.testing.assert_array_equal(actual, expected)
