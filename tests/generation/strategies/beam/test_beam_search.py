"""Beam search and beam sampling."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
import tiny
from conformance_runs import arrays, cases, compare, model, problems, run
from generation_tools import (
    FAMILIES,
    cache_copies,
    compilations,
    compiled_loop,
    loop_is_in_place,
    prompts,
    sorted_sizes,
    started,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxllm
from jaxllm.common.errors import InputError, UnsupportedError

BEAMS = [
    case
    for case in cases().values()
    if case["mode"] in ("beam", "group_beam", "constrained") and "prefix_rule" not in case
]


@pytest.mark.parametrize("case", BEAMS, ids=lambda case: case["id"])
def test_conformance(case):
    assert problems(case, run(case)) == []


@pytest.mark.ci
def test_conformance_of_what_beam_sampling_keeps():
    case = cases()["s-beam-sample-keep"]
    rows = len(case["inputs"]["input_ids"])
    first = run(case, output_scores=True).scores[0]
    beams = case["generate_kwargs"]["num_beams"]
    actual = {"first_step_scores": first}
    assert len(first) == rows * beams
    assert compare.check(case, actual, arrays(), atol=1e-4) == []


# --- against a search that looks at everything

NEW = 3
VOCABULARY = 3


def log_probs_of_all_texts(net, prompt, eos):
    """Log-probability of every text of up to NEW tokens that ends or is full."""
    texts = np.array(list(itertools.product(range(VOCABULARY), repeat=NEW)))
    full = np.concatenate([np.repeat(prompt[None], len(texts), 0), texts], axis=1)
    logits = np.asarray(net(full).logits, np.float64)[:, len(prompt) - 1 : -1]
    steps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(steps, texts[..., None], 2)[..., 0]
    actual = {}
    for text, each in zip(texts.tolist(), chosen, strict=True):
        ends = [i for i, token in enumerate(text) if token in eos]
        length = ends[0] + 1 if ends else NEW
        actual[tuple(text[:length])] = each[:length].sum()
    return actual


@pytest.mark.ci
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**20),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=3),
    eos=st.sampled_from([(1,), (0, 2), ()]),
    length_penalty=st.sampled_from([0.0, 1.0, -1.5, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_full_width_search_is_exhaustive(seed, prompt, eos, length_penalty, early_stopping):
    net = tiny.make("llama", vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, seed=seed)
    count = VOCABULARY**NEW
    out = jaxllm.generate(
        net,
        [prompt],
        [[1] * len(prompt)],
        num_beams=count,
        num_return_sequences=5,
        max_new_tokens=NEW,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    everything = log_probs_of_all_texts(net, np.array(prompt), eos)
    scores = {text: total / len(text) ** length_penalty for text, total in everything.items()}
    best = sorted(scores.values(), reverse=True)[:5]
    np.testing.assert_allclose(out.sequences_scores, best, atol=1e-4, rtol=1e-4)
    for row, score, origin in zip(
        out.sequences, out.sequences_scores, out.beam_indices, strict=True
    ):
        text = tuple(int(t) for t in row[len(prompt) :][origin >= 0])
        assert abs(scores[text] - score) < 1e-3


def naive_beams(net, prompt, beams, new, eos, length_penalty, early_stopping):
    """Beam search over lists, one forward pass a step: the pool of the best `beams` texts."""
    running, pool = [(0.0, ())], []
    for step in range(1, new + 1):
        ids = np.array([[*prompt, *text] for _, text in running])
        logits = np.asarray(net(ids).logits, np.float64)[:, -1]
        steps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        grown = [
            (total + steps[i, token], (*text, token))
            for i, (total, text) in enumerate(running)
            for token in range(logits.shape[1])
        ]
        grown.sort(key=lambda item: -item[0])
        ended = [step == new or text[-1] in eos for _, text in grown]
        full = len(pool) == beams and early_stopping is True
        if not full:
            pool += [
                (total / step**length_penalty, text)
                for (total, text), end in list(zip(grown, ended, strict=True))[:beams]
                if end
            ]
            pool = sorted(pool, key=lambda item: -item[0])[:beams]
        running = [item for item, end in zip(grown, ended, strict=True) if not end][:beams]
        if step == new or (len(pool) == beams and early_stopping is True):
            break
        length = new if early_stopping == "never" and length_penalty > 0 else step
        if len(pool) == beams and running[0][0] / length**length_penalty <= pool[-1][0]:
            break
    return pool


@pytest.mark.ci
@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    eos=st.sampled_from([(1,), (0, 3), (2, 5, 6)]),
    length_penalty=st.sampled_from([0.0, 1.0, -1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_a_naive_search_finds_the_same(seed, eos, length_penalty, early_stopping):
    net = tiny.make("llama", vocab_size=9, bos_token_id=None, eos_token_id=None, seed=seed)
    prompt, beams, new = [4, 7, 8], 3, 8
    out = jaxllm.generate(
        net,
        [prompt],
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=new,
        eos_token_id=list(eos),
        pad_token_id=0,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    expected = naive_beams(net, prompt, beams, new, eos, length_penalty, early_stopping)
    np.testing.assert_allclose(
        out.sequences_scores[: len(expected)],
        [score for score, _ in expected],
        atol=1e-4,
        rtol=1e-4,
    )
    for row, origin, (_, text) in zip(out.sequences, out.beam_indices, expected, strict=False):
        assert tuple(row[len(prompt) :][origin >= 0]) == text


# --- as every strategy

FIELDS = {"num_beams": 3, "max_new_tokens": 10, "num_return_sequences": 2}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, False) for name in FAMILIES),
        ("s_llama", True),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in FAMILIES[1:]),
    ],
)
def test_left_padded_equals_right_padded_equals_alone(name, sampling):
    fields = {**FIELDS, "eos_token_id": [5, 6, 11], "do_sample": sampling, "key": 1, "top_k": 0}
    outs = []
    for side in ("left", "right"):
        rows, ids, mask = prompts(name, side=side)
        outs.append(jaxllm.generate(model(name), ids, mask, **fields))
    left, right = (out.sequences[:, -max(out.beam_indices.shape[1], 1) :] for out in outs)
    np.testing.assert_array_equal(left, right)
    for i, row in enumerate(rows):
        single = jaxllm.generate(model(name), row[None], row_ids=[i], **fields)
        two = slice(2 * i, 2 * i + 2)
        np.testing.assert_allclose(
            single.sequences_scores, outs[0].sequences_scores[two], atol=1e-4
        )
        new = single.beam_indices.shape[1]
        np.testing.assert_array_equal(single.sequences[:, -new:], left[two, :new])


@pytest.mark.ci
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_the_texts(name):
    """The score of a beam is the sum of its own log-probabilities, taken without a cache."""
    net = model(name)
    _, ids, mask = prompts(name)
    out = jaxllm.generate(net, ids, mask, **FIELDS, length_penalty=0.0, eos_token_id=None)
    ids, mask = np.repeat(ids, 2, axis=0), np.repeat(mask, 2, axis=0)
    if net.is_encoder_decoder:
        logits, texts = net(ids, mask, out.sequences).logits[:, :-1], out.sequences[:, 1:]
    else:
        full = np.concatenate([mask, np.ones((len(ids), 10), int)], axis=1)
        logits, texts = net(out.sequences, full).logits[:, 6:-1], out.sequences[:, 7:]
    steps = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), texts[..., None], 2)
    np.testing.assert_allclose(out.sequences_scores, steps[..., 0].sum(1), atol=1e-3)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["s_llama", "s_t5_gated", pytest.param("s_gpt2", marks=pytest.mark.slow)]
)
def test_cache_is_donated_and_never_copied_or_reordered(name):
    _, ids, mask = prompts(name)
    begun = started(name, ids, mask, num_beams=3, max_new_tokens=40, eos_token_id=None)
    assert cache_copies(*begun) == []
    assert loop_is_in_place(*begun)


@pytest.mark.ci
@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
        {"num_beams": 4, "force_words_ids": [[5, 6]]},
    ],
    ids=["plain", "groups", "constrained"],
)
def test_the_compiled_loop_sorts_no_vocabulary(fields):
    _, ids, mask = prompts("s_llama")
    program = compiled_loop(*started("s_llama", ids, mask, max_new_tokens=20, **fields))
    assert "TopK" in program
    assert [size for size in sorted_sizes(program) if size >= 131] == []


@pytest.mark.ci
@pytest.mark.parametrize("sampling", [False, True])
def test_numbers_compile_nothing(sampling):
    _, ids, mask = prompts("s_llama")

    def call(**numbers):
        fields = {"length_penalty": 1.0, "repetition_penalty": 1.2, "eos_token_id": [5], **numbers}
        fields |= {"temperature": 0.7, "top_p": 0.9} if sampling else {}
        fields = {**FIELDS, **fields, "do_sample": sampling, "key": 0}
        return jaxllm.generate(model("s_llama"), ids, mask, **fields)

    call()
    for numbers in (
        {"length_penalty": -0.5},
        # What a warper keeps at least follows the number of end tokens, and is static.
        {"eos_token_id": [7] if sampling else [3, 4, 7]},
        {"repetition_penalty": 1.0},
        {"max_new_tokens": 14},
    ):
        assert compilations(lambda numbers=numbers: call(**numbers)) == []


@pytest.mark.ci
def test_inside_the_callers_jit():
    net = model("s_t5_gated")
    _, ids, mask = prompts("s_t5_gated")

    @jax.jit
    def call(net, ids, mask, length_penalty):
        net = net.with_card(card)
        return jaxllm.generate(net, ids, mask, **FIELDS, length_penalty=length_penalty)

    card = net.card
    actual = call(net, ids, mask, 0.3)
    expected = jaxllm.generate(net, ids, mask, **FIELDS, length_penalty=0.3)
    width = expected.sequences.shape[1]
    np.testing.assert_array_equal(actual.sequences[:, :width], expected.sequences)
    np.testing.assert_allclose(actual.sequences_scores, expected.sequences_scores, rtol=1e-5)


@pytest.mark.ci
def test_what_beams_cannot_do_is_named():
    net = model("s_llama")
    with pytest.raises(UnsupportedError, match="stream"):
        next(jaxllm.stream(net, [[5]], num_beams=2))
    with pytest.raises(InputError, match="num_return_sequences"):
        jaxllm.generate(net, [[5]], num_beams=2, num_return_sequences=3)
    with pytest.raises(InputError, match="early_stopping"):
        jaxllm.generate(net, [[5]], num_beams=2, early_stopping="sometimes")


@pytest.mark.ci
@pytest.mark.parametrize("remove", [False, True])
def test_constraints_that_a_forced_end_token_cuts_off(remove):
    """The forced end token forbids what the constraint wants, and sequences of forbidden tokens are
    returned with their scores, as in transformers 4.56, not empty places of the pool."""
    _, ids, mask = prompts("s_llama")
    fields = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 3, "eos_token_id": 2}
    fields |= {"forced_eos_token_id": 2, "pad_token_id": 0, "remove_invalid_values": remove}
    out = jaxllm.generate(
        model("s_llama"), ids, mask, force_words_ids=[[7, 8, 9, 10]], output_scores=True, **fields
    )
    new = np.asarray(out.sequences)[:, -3:]
    assert not (new == 2).any()
    assert {7, 8} & set(new.flat)
    for row in new.reshape(len(ids), 3, 3).tolist():
        assert len(set(map(tuple, row))) == 3
    np.testing.assert_allclose(out.sequences_scores, np.finfo(np.float32).min / 3, rtol=1e-6)
