"""Classifier-free guidance: the reference's cases, uncached passes, padding, other strategies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import cases, model, problems, run
from generation_tools import cache_copies, compilations, loop_is_in_place, prompts, started

import jaxllm
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.processors import UnbatchedClassifierFreeGuidanceLogitsProcessor

CASES = [case for case in cases().values() if "guidance_scale" in case["generate_kwargs"]]
NAMES = ("s_llama", "s_gpt2")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_conformance(case):
    assert problems(case, run(case, output_scores=True)) == []


def test_number_of_conformance_cases():
    assert len(CASES) == 2


def generate(name, ids, mask=None, **fields):
    fields = {"guidance_scale": 2.5, "eos_token_id": None, "max_new_tokens": 9, **fields}
    return jaxllm.generate(model(name), ids, mask, **fields)


def negatives(name, lengths=(4, 9, 2), side="left"):
    rows, ids, mask = prompts(name, lengths, seed=5, side=side)
    return rows, {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}


def log_probs(net, row):
    return jax.nn.log_softmax(net(np.asarray(row)[None]).logits[0])


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_cached_equals_uncached(name):
    """Scores of every step from two passes without padding: the prompt's and the other context's.

    One negative prompt is longer than the prompts, two are shorter.
    """
    rows, ids, mask = prompts(name)
    others, negative = negatives(name)
    out = generate(name, ids, mask, **negative, output_scores=True)
    scores = np.stack(out.scores, axis=1)
    for row, other, new, actual in zip(rows, others, out.sequences[:, 7:], scores, strict=True):
        c = log_probs(model(name), [*row, *new[:-1]])[len(row) - 1 :]
        u = log_probs(model(name), [*other, *new[:-1]])[len(other) - 1 :]
        np.testing.assert_allclose(actual, 2.5 * (c - u) + u, atol=1e-3, rtol=1e-4)
        np.testing.assert_array_equal(np.argmax(actual, axis=-1), new)


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_left_padded_equals_right_padded_equals_alone(name):
    rows, ids, mask = prompts(name)
    others, left = negatives(name)
    expected = generate(name, ids, mask, **left).sequences[:, -9:]
    _, ids, mask = prompts(name, side="right")
    _, right = negatives(name, side="right")
    np.testing.assert_array_equal(generate(name, ids, mask, **right).sequences[:, -9:], expected)
    for row, other, new in zip(rows, others, expected, strict=True):
        single = generate(name, row[None], negative_prompt_ids=other[None]).sequences
        np.testing.assert_array_equal(single[0, -9:], new)


@pytest.mark.ci
def test_without_a_negative_prompt_the_last_real_token_is_the_context():
    rows, ids, mask = prompts("s_llama", side="right")
    expected = generate("s_llama", ids, mask, negative_prompt_ids=[[row[-1]] for row in rows])
    actual = generate("s_llama", ids, mask)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)


@pytest.mark.ci
def test_a_scale_of_one_builds_nothing():
    _, ids, mask = prompts("s_llama")
    _, negative = negatives("s_llama")
    plain = generate("s_llama", ids, mask, guidance_scale=None).sequences
    guided = []
    run = lambda: guided.append(generate("s_llama", ids, mask, guidance_scale=1.0, **negative))  # noqa: E731
    assert compilations(run) == []
    np.testing.assert_array_equal(guided[0].sequences, plain)


@pytest.mark.ci
def test_inside_the_callers_jit():
    _, ids, mask = prompts("s_llama")
    _, negative = negatives("s_llama")

    @jax.jit
    def call(net, ids, mask, negative, scale):
        ends = {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
        fields = {**ends, "output_scores": True, **negative}
        out = jaxllm.generate(net, ids, mask, guidance_scale=scale, **fields)
        return out.sequences, jnp.stack(out.scores)

    for scale in (2.5, 1.0):  # 1 leaves the raw logits, though the program is the same
        expected = generate(
            "s_llama", ids, mask, **negative, guidance_scale=scale, output_scores=True
        )
        sequences, scores = call(model("s_llama"), ids, mask, negative, scale)
        np.testing.assert_array_equal(sequences, expected.sequences)
        np.testing.assert_allclose(scores, np.stack(expected.scores), atol=1e-3)


@pytest.mark.ci
def test_numbers_and_lengths_compile_nothing():
    def run(length=7, other=9, new=9, **fields):
        _, ids, mask = prompts("s_llama", (length, 3, 4))
        _, negative = negatives("s_llama", (other, 3, 1))
        return generate("s_llama", ids, mask, max_new_tokens=new, **negative, **fields)

    run()
    assert compilations(lambda: run(9, 5, 12, guidance_scale=0.3, eos_token_id=[5, 6])) == []
    assert compilations(lambda: run(3, 16, 9, guidance_scale=-1.0)) == []


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_the_cache_is_donated_and_never_copied(name):
    _, ids, mask = prompts(name)
    _, negative = negatives(name)
    fields = {"guidance_scale": 2.0, "max_new_tokens": 70, "eos_token_id": None}
    call = started(name, ids, mask, **fields, **negative)
    assert cache_copies(*call) == []
    assert loop_is_in_place(*call)


@pytest.mark.slow
def test_sampling_several_results():
    _, ids, mask = prompts("s_llama")
    _, negative = negatives("s_llama")
    fields = {"do_sample": True, "top_k": 0, "key": 2, "guidance_scale": 1.3}
    out = generate("s_llama", ids, mask, num_return_sequences=3, **negative, **fields).sequences
    one = generate("s_llama", ids, mask, **negative, **fields).sequences
    np.testing.assert_array_equal(out[::3], one)
    assert (out[::3] != out[1::3]).any()


@pytest.mark.ci
def test_other_processors_come_after():
    _, ids, mask = prompts("s_llama")
    _, negative = negatives("s_llama")
    plain = generate("s_llama", ids, mask, **negative, max_new_tokens=1, output_scores=True)
    fields = {"repetition_penalty": 1.5, "max_new_tokens": 1, "output_scores": True}
    out = generate("s_llama", ids, mask, **negative, **fields)
    seen = ids[0]
    s = np.asarray(plain.scores[0])[0, seen]
    np.testing.assert_allclose(
        np.asarray(out.scores[0])[0, seen], np.where(s < 0, s * 1.5, s / 1.5), rtol=1e-5
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": [1]}], ids=["k", "dola"]
)
def test_with_another_strategy(strategy):
    """A row alone and unpadded, and the logits of both contexts at every step."""
    rows, ids, mask = prompts("s_llama")
    others, negative = negatives("s_llama")
    fields = {**strategy, "output_scores": True, "output_logits": True}
    out = generate("s_llama", ids, mask, **negative, **fields)
    logits, scores = (np.stack(x, axis=1) for x in (out.logits, out.scores))
    for i, (row, other) in enumerate(zip(rows, others, strict=True)):
        new = out.sequences[i, 7:]
        single = generate("s_llama", row[None], negative_prompt_ids=other[None], **fields)
        np.testing.assert_array_equal(single.sequences[0, -9:], new)
        c = log_probs(model("s_llama"), [*row, *new[:-1]])[len(row) - 1 :]
        u = log_probs(model("s_llama"), [*other, *new[:-1]])[len(other) - 1 :]
        np.testing.assert_allclose(jax.nn.log_softmax(logits[i]), c, atol=1e-4)
        if "dola_layers" not in strategy:  # there it is the difference of layers that is guided
            np.testing.assert_allclose(scores[i], 2.5 * (c - u) + u, atol=1e-3, rtol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    "beams",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 3, "force_words_ids": [[17, 18]]},
    ],
    ids=["beams", "groups", "constraints"],
)
def test_with_beams(beams):
    """Each text's score is the sum of the guided scores of its tokens, which two uncached passes
    give: so every beam kept its own unconditional context."""
    rows, ids, mask = prompts("s_llama", (7, 4))
    others, negative = negatives("s_llama", (3, 9))
    fields = {"length_penalty": 0.0, "max_new_tokens": 7, "output_scores": True}
    out = generate("s_llama", ids, mask, **negative, **fields, **beams)
    each = len(out.sequences) // 2
    for i, (text, actual) in enumerate(zip(out.sequences, out.sequences_scores, strict=True)):
        new = text[7:]
        row, other = rows[i // each], others[i // each]
        c = log_probs(model("s_llama"), [*row, *new[:-1]])[len(row) - 1 :]
        u = log_probs(model("s_llama"), [*other, *new[:-1]])[len(other) - 1 :]
        expected = (2.5 * (c - u) + u)[np.arange(7), new].sum()
        if "diversity_penalty" in beams:  # up to so much a token that another group took
            assert expected - 0.5 * 2 * 7 - 1e-3 <= actual <= expected + 1e-3
        else:
            np.testing.assert_allclose(actual, expected, atol=2e-3)


@pytest.mark.ci
def test_a_prompt_of_embeddings_and_a_stream():
    _, ids, mask = prompts("s_gpt2")
    _, negative = negatives("s_gpt2")
    expected = generate("s_gpt2", ids, mask, **negative).sequences[:, 7:]
    embeds = model("s_gpt2").backbone.embed(jnp.asarray(ids))
    actual = generate("s_gpt2", None, mask, inputs_embeds=embeds, **negative).sequences
    np.testing.assert_array_equal(actual, expected)
    fields = {"guidance_scale": 2.5, "eos_token_id": None, "max_new_tokens": 9}
    chunks = list(jaxllm.stream(model("s_gpt2"), ids, mask, chunk_size=4, **negative, **fields))
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), expected)


STATES = {"encoder_hidden_states": np.zeros((1, 3, 32), np.float32)}


@pytest.mark.parametrize(
    ("name", "fields", "error", "match"),
    [
        ("s_t5_gated", {}, UnsupportedError, "guidance_scale: not for encoder-decoders"),
        ("s_gpt2", {"token_type_ids": [[1, 1]]}, UnsupportedError, "token_type_ids"),
        ("s_gpt2_xattn", STATES, UnsupportedError, "encoder_hidden_states"),
        ("s_llama", {"negative_prompt_ids": [[1], [2]]}, InputError, "2 rows for 1 prompts"),
        ("s_llama", {"negative_prompt_ids": [[999]]}, InputError, "negative_prompt_ids"),
        (
            "s_llama",
            {"negative_prompt_ids": [[4]], "negative_prompt_attention_mask": [[0]]},
            InputError,
            "negative_prompt_attention_mask: row 0",
        ),
        ("s_llama", {"negative_prompt_attention_mask": [[1]]}, InputError, "without negative_p"),
        (
            "s_llama",
            {"negative_prompt_ids": [[4]], "guidance_scale": None},
            InputError,
            "no effect without guidance_scale",
        ),
        ("s_gpt2", {"negative_prompt_ids": [[4] * 95]}, InputError, "positions"),
        ("s_llama", {"guidance_scale": "much"}, InputError, "guidance_scale"),
    ],
)
def test_what_cannot_be_is_named(name, fields, error, match):
    with pytest.raises(error, match=match):
        generate(name, [[5, 6]], **fields)


def test_embeddings_alone_need_a_negative_prompt():
    embeds = np.zeros((1, 3, model("s_llama").config.width), np.float32)
    with pytest.raises(InputError, match="negative_prompt_ids: needed"):
        generate("s_llama", None, inputs_embeds=embeds)


@pytest.mark.ci
def test_the_processor():
    c = jnp.log(jnp.array([[0.5, 0.25, 0.25, 0.0]])) + 3.0
    u = jnp.log(jnp.array([[0.25, 0.5, 0.25, 0.0]])) - 1.0
    ids = jnp.zeros((1, 4), jnp.int32)

    def guided(scale):
        guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(scale)
        return np.asarray(guide(ids, c, 2, unconditional_logits=u))[0]

    np.testing.assert_allclose(np.exp(guided(2.0)), [1.0, 0.125, 0.25, 0.0], rtol=1e-5)
    np.testing.assert_allclose(np.exp(guided(0.0)), [0.25, 0.5, 0.25, 0.0], rtol=1e-5)
    np.testing.assert_array_equal(guided(1.0), c[0])
    with pytest.raises(InputError, match="guidance_scale"):
        UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5)(ids, c, 2)
