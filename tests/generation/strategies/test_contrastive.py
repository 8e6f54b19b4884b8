"""Contrastive search: the reference's cases, an uncached search, padding, the cache, the edges."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import cases, model, problems, run
from generation_tools import cache_copies, compilations, loop_is_in_place, prompts, started

import jaxllm
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.strategies.contrastive import max_cosine, unit_vectors

SEARCH = {"penalty_alpha": 0.6, "top_k": 4}
CASES = [case for case in cases().values() if case["mode"] == "contrastive"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_conformance(case):
    assert problems(case, run(case, output_scores=True)) == []


def test_number_of_conformance_cases():
    assert len(CASES) == 3


def generate(name, ids, mask=None, **fields):
    return jaxllm.generate(model(name), ids, mask, **{**SEARCH, "eos_token_id": None, **fields})


@pytest.mark.ci
@pytest.mark.parametrize("name", ["s_llama", "s_t5_gated"])
def test_left_padded_equals_right_padded_equals_alone(name):
    results = []
    for side in ("left", "right"):
        rows, ids, mask = prompts(name, side=side)
        out = generate(name, ids, mask, max_new_tokens=9)
        results.append(out.sequences[:, -9:])
    np.testing.assert_array_equal(*results)
    for row, expected in zip(rows, results[0], strict=True):
        single = generate(name, row[None], max_new_tokens=9)
        np.testing.assert_array_equal(single.sequences[0, -9:], expected)


@jax.jit
def read(net, ids, mask):
    out = net(ids, mask, output_hidden_states=True)
    return out.logits, out.hidden_states[-1]


def uncached(net, row, new: int, alpha: float, k: int) -> list[int]:
    """The rule itself: every candidate is read with all that came before it."""
    row = list(row)
    for _ in range(new):
        size = len(row)
        ids = np.zeros((k, 32), int)
        ids[:, :size] = row
        mask = np.broadcast_to(np.arange(32) <= size, ids.shape)
        logits = np.asarray(read(net, ids, mask)[0], np.float64)[0, size - 1]
        p = np.exp(logits - logits.max())
        tokens = np.argsort(-p, kind="stable")[:k]
        ids[:, size] = tokens
        h = np.asarray(read(net, ids, mask)[1], np.float64)
        h /= np.linalg.norm(h, axis=-1, keepdims=True)
        similarity = [(h[i, :size] @ h[i, size]).max() for i in range(k)]
        value = (1 - alpha) * p[tokens] / p.sum() - alpha * np.array(similarity)
        row.append(int(tokens[np.argmax(value)]))
    return row


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "alpha", "k"), [("s_llama", 0.6, 4), ("s_llama", 1.0, 4), ("s_gpt2", 0.3, 9)]
)
def test_cached_equals_uncached(name, alpha, k):
    rows, ids, mask = prompts(name)
    out = generate(name, ids, mask, max_new_tokens=12, penalty_alpha=alpha, top_k=k)
    for row, actual in zip(rows, out.sequences, strict=True):
        assert uncached(model(name), row, 12, alpha, k) == list(actual[7 - len(row) :])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("s_gpt2", {"guidance_scale": 1.5}),
        pytest.param("s_t5_gated", {}, marks=pytest.mark.slow),
    ],
)
def test_low_memory_changes_nothing_but_what_is_kept(name, fields):
    """Candidates are read one after the other: same texts, scores, hidden states, attentions."""
    _, ids, mask = prompts(name)
    fields = {**fields, "max_new_tokens": 9, "output_scores": True, "output_hidden_states": True}
    fields["output_attentions"] = True
    expected = generate(name, ids, mask, **fields)
    actual = generate(name, ids, mask, **fields, low_memory=True)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.ci
def test_low_memory_keeps_one_slot_for_all_candidates_and_copies_no_cache():
    _, ids, mask = prompts("s_llama")
    fields = {**SEARCH, "max_new_tokens": 80, "eos_token_id": None}
    call = started("s_llama", ids, mask, **fields, low_memory=True)
    assert cache_copies(*call) == []
    assert loop_is_in_place(*call)
    slots = [c[2].cache.capacity for c in (call, started("s_llama", ids, mask, **fields))]
    assert slots[1] - slots[0] == SEARCH["top_k"] - 1


@pytest.mark.ci
def test_low_memory_is_of_contrastive_search():
    with pytest.raises(UnsupportedError, match="low_memory: only contrastive search has it"):
        jaxllm.generate(model("s_llama"), [[5]], num_beams=2, low_memory=True)
    with pytest.warns(UserWarning, match=r"low_memory.*no effect"):
        jaxllm.generate(model("s_llama"), [[5]], max_new_tokens=1, low_memory=True)


@pytest.mark.ci
def test_numbers_and_lengths_compile_nothing():
    def run(length=7, new=9, **fields):
        _, ids, mask = prompts("s_llama", (length, 3, 4))
        return generate("s_llama", ids, mask, max_new_tokens=new, **fields)

    run()
    assert compilations(lambda: run(9, 12, penalty_alpha=0.35, eos_token_id=[5, 6])) == []
    assert compilations(lambda: run(top_k=5)) != []  # it shapes the program


@pytest.mark.ci
@pytest.mark.parametrize(("name", "batch"), [("s_llama", 3), ("s_gpt2", 1), ("s_t5_gated", 1)])
def test_the_cache_is_donated_and_never_copied(name, batch):
    _, ids, mask = prompts(name, (7, 3, 5)[:batch])
    call = started(name, ids, mask, max_new_tokens=80, eos_token_id=None, **SEARCH)
    assert cache_copies(*call) == []
    assert loop_is_in_place(*call)


@pytest.mark.ci
def test_inside_the_callers_jit():
    _, ids, mask = prompts("s_llama")

    @jax.jit
    def call(net, ids, mask, alpha):
        fields = {"max_new_tokens": 8, "top_k": 4, "eos_token_id": 2, "pad_token_id": 0}
        return jaxllm.generate(net, ids, mask, penalty_alpha=alpha, **fields).sequences

    actual = call(model("s_llama"), ids, mask, 0.6)
    expected = generate("s_llama", ids, mask, max_new_tokens=8, eos_token_id=2).sequences
    np.testing.assert_array_equal(np.asarray(actual)[:, : expected.shape[1]], expected)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["s_t5_gated"])
def test_stream_equals_generate_and_shares_its_programs(name):
    _, ids, mask = prompts(name)
    fields = {**SEARCH, "max_new_tokens": 11, "eos_token_id": None}
    full = jaxllm.generate(model(name), ids, mask, **fields).sequences
    chunks = []
    stream = jaxllm.stream(model(name), ids, mask, chunk_size=4, **fields)
    assert compilations(lambda: chunks.extend(stream)) == []
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), full[:, -11:])


@pytest.mark.ci
def test_a_streamer_gets_the_prompt_and_every_token():
    class Streamer:
        def __init__(self):
            self.columns, self.ended = [], False

        def put(self, tokens):
            self.columns.append(tokens)

        def end(self):
            self.ended = True

    _, ids, mask = prompts("s_llama")
    streamer = Streamer()
    out = generate("s_llama", ids, mask, max_new_tokens=9, streamer=streamer).sequences
    np.testing.assert_array_equal(streamer.columns[0], ids)
    np.testing.assert_array_equal(np.stack(streamer.columns[1:], axis=1), out[:, 7:])
    assert streamer.ended


def test_finished_rows_get_pads_and_change_no_other():
    _, ids, mask = prompts("s_llama")
    free = generate("s_llama", ids, mask, max_new_tokens=12).sequences[:, 7:]
    stops = [int(free[0, 2]), int(free[1, 5])]
    out = generate("s_llama", ids, mask, max_new_tokens=12, eos_token_id=stops, pad_token_id=77)
    assert out.sequences.shape[1] <= 19
    for row, unstopped in zip(out.sequences[:, 7:], free, strict=True):
        end = next((i + 1 for i, t in enumerate(unstopped) if t in stops), 12)
        np.testing.assert_array_equal(row[:end], unstopped[: min(end, len(row))])
        assert (row[end:] == 77).all()


@pytest.mark.ci
def test_scores_are_processed_and_logits_raw():
    _, ids, mask = prompts("s_llama")
    fields = {"max_new_tokens": 6, "suppress_tokens": [9, 11]}
    out = generate("s_llama", ids, mask, **fields, output_scores=True, output_logits=True)
    assert len(out.scores) == len(out.logits) == 6
    full = np.concatenate([mask, np.ones((3, 6), int)], axis=1)
    expected = model("s_llama")(out.sequences, full).logits[:, 6:-1]
    np.testing.assert_allclose(np.stack(out.logits, axis=1), expected, atol=1e-5)
    scores = np.stack(out.scores, axis=1)
    assert np.isneginf(scores[:, :, [9, 11]]).all()
    others = np.delete(np.arange(scores.shape[-1]), [9, 11])
    np.testing.assert_allclose(scores[..., others], expected[..., others], atol=1e-5)


@pytest.mark.ci
def test_a_forbidden_token_is_no_candidate():
    """transformers may take one whose state is unlike the context's: its probability is 0."""
    _, ids, mask = prompts("s_llama")
    fields = {"max_new_tokens": 6, "penalty_alpha": 1.0}
    out = generate("s_llama", ids, mask, **fields, forced_eos_token_id=5).sequences
    assert (out[:, -1] == 5).all()
    allowed = [7, 8]  # fewer than candidates
    rest = [i for i in range(131) if i not in allowed]
    out = generate("s_llama", ids, mask, **fields, suppress_tokens=rest).sequences
    assert np.isin(out[:, 7:], allowed).all()


@pytest.mark.ci
def test_a_prompt_of_embeddings():
    _, ids, mask = prompts("s_llama")
    embeds = model("s_llama").backbone.embed(jnp.asarray(ids))
    expected = generate("s_llama", ids, mask, max_new_tokens=7).sequences[:, 7:]
    actual = generate("s_llama", None, mask, inputs_embeds=embeds, max_new_tokens=7).sequences
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.ci
def test_gpt2_reaches_its_last_position():
    ids = np.full((1, 90), 7)
    assert generate("s_gpt2", ids, max_new_tokens=6, top_k=50).sequences.shape == (1, 96)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"top_k": 132}, InputError, "132 candidates of a vocabulary of 131"),
        ({"num_return_sequences": 2}, InputError, "num_return_sequences"),
        ({"use_cache": False}, UnsupportedError, "use_cache"),
        ({"penalty_alpha": 1.5}, InputError, "penalty_alpha"),
    ],
)
def test_what_cannot_be_is_named(fields, error, match):
    with pytest.raises(error, match=match):
        generate("s_llama", [[5]], **fields)


def test_top_k_cannot_be_a_tracer():
    call = jax.jit(lambda k: generate("s_llama", [[5]], top_k=k).sequences)
    with pytest.raises(InputError, match="top_k"):
        call(4)


@pytest.mark.ci
def test_similarity_looks_at_known_columns_only():
    vectors = unit_vectors(jnp.array([[[3.0, 4.0], [0.0, 0.0], [2.0, 0.0]]]))
    np.testing.assert_allclose(vectors[0], [[0.6, 0.8], [0, 0], [1, 0]], atol=1e-6)
    candidates = unit_vectors(jnp.array([[[1.0, 0.0], [0.0, 1.0]]]))
    best = max_cosine(jnp.array([[True, True, False]]), vectors, candidates)
    np.testing.assert_allclose(best, [[0.6, 0.8]], atol=1e-6)
