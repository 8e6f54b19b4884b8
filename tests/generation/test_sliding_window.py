"""A sliding window in every strategy: a band of the mask, whatever is held besides."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny
from generation_tools import NO_EOS, banded, padded, turns

import jaxllm

ROWS, WINDOW, NEW = (2, 21), 4, 10
SOURCE = turns(9, 5, 3)
FIELDS = {
    "max_new_tokens": NEW,
    "cache_implementation": "sliding_window",
    "cache_config": {"sliding_window": WINDOW},
    **NO_EOS,
}
CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 3}


def inputs(family: str) -> dict:
    """Prompts shorter and longer than the window; T5 has them on the decoder's side."""
    rows = turns(0, *ROWS)
    if family != "t5":
        return dict(zip(("input_ids", "attention_mask"), padded(rows), strict=True))
    sides = padded([[0, *row[:-1]] for row in rows])
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    return dict(zip(names, (*padded(SOURCE), *sides), strict=True))


def logits_in_a_band(net, family: str, row: int, new: np.ndarray) -> np.ndarray:
    """Logits of the new tokens of one row, from an uncached pass."""
    text, source = turns(0, *ROWS)[row], None
    if family == "t5":
        text, source = [0, *text[:-1]], SOURCE[row]
    return banded(net, [*text, *new[:-1].tolist()], WINDOW, source)[len(text) - 1 :]


def generated(family: str, **fields) -> tuple[jaxllm.generation.GenerateOutput, np.ndarray]:
    """The output, and the new tokens."""
    out = jaxllm.generate(tiny.cached(family), **inputs(family), **FIELDS, **fields)
    return out, np.asarray(out.sequences)[:, -NEW:]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"num_beams": 3}),
        pytest.param("gpt2", {"num_beams": 3, "do_sample": True, "key": 1}, marks=pytest.mark.slow),
        pytest.param("t5", {"num_beams": 3}, marks=pytest.mark.slow),
        pytest.param(
            "llama",
            {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt2", {"num_beams": 3, "force_words_ids": [[7, 9]]}, marks=pytest.mark.slow),
    ],
)
def test_beams(family, fields):
    """The score of each text is what an uncached pass with a band in its mask gives it."""
    net = tiny.cached(family)
    fields = {"top_k": 0, **fields} if "do_sample" in fields else fields
    out, new = generated(family, num_return_sequences=2, **fields)
    for i, tokens in enumerate(new):
        log_p = jax.nn.log_softmax(logits_in_a_band(net, family, i // 2, tokens), axis=-1)
        score = log_p[np.arange(NEW), tokens].sum() / NEW
        np.testing.assert_allclose(out.sequences_scores[i], score, atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt2", CONTRASTIVE),
        pytest.param("llama", {**CONTRASTIVE, "low_memory": True}, marks=pytest.mark.slow),
        pytest.param("t5", CONTRASTIVE, marks=pytest.mark.slow),
    ],
)
def test_candidates(family, fields):
    out, new = generated(family, output_scores=True, **fields)
    for i, tokens in enumerate(new):
        expected = logits_in_a_band(tiny.cached(family), family, i, tokens)
        np.testing.assert_allclose(np.stack(out.scores)[:, i], expected, atol=3e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "lookup"),
        pytest.param("t5", "early exit", marks=pytest.mark.slow),
        pytest.param("gpt2", "assistant", marks=pytest.mark.slow),
    ],
)
def test_drafts(family, kind):
    """The tokens of greedy search, which has a ring; an assistant has the window as well."""
    drafts = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "early exit": {"assistant_early_exit": 1},
        "assistant": {
            "assistant_model": tiny.cached(family),
            "num_assistant_tokens": 4,
            "assistant_confidence_threshold": 0.0,
        },
    }
    greedy, _ = generated(family, output_scores=True)
    out, _ = generated(family, output_scores=True, **drafts[kind])
    np.testing.assert_array_equal(out.sequences, greedy.sequences)
    np.testing.assert_allclose(np.stack(out.scores), np.stack(greedy.scores), atol=3e-4)
    if kind == "assistant":
        np.testing.assert_array_equal(out.assisted.accepted, out.assisted.drafted)


@pytest.mark.ci
def test_attentions():
    """No weight beyond the window, and none is lost."""
    out, _ = generated("llama", output_attentions=True)
    plain, _ = generated("llama")
    np.testing.assert_array_equal(out.sequences, plain.sequences)
    mask = np.asarray(inputs("llama")["attention_mask"], bool)
    for step, layers in enumerate(out.attentions):
        known = np.pad(mask, ((0, 0), (0, step)), constant_values=True)
        position = known.cumsum(axis=1) - 1
        queries = slice(0, mask.shape[1]) if step == 0 else slice(-1, None)
        far = position[:, None, :] <= position[:, queries, None] - WINDOW
        for weights in layers:
            assert not (np.asarray(weights) * far[:, None]).any()
            total = np.asarray(weights).sum(axis=-1)
            np.testing.assert_allclose(total[:, :, -1], 1, atol=1e-5)


@pytest.mark.ci
def test_64_bit_mode():
    """The cache of an earlier call is put in order there as well."""
    net, (ids, mask) = tiny.cached("llama"), padded(turns(0, 6, 3))
    fields = FIELDS | {"max_new_tokens": 3}
    new = np.array(turns(1, 1, 1))
    with jax.enable_x64(True):
        out = jaxllm.generate(net, ids, mask, return_past_key_values=True, **fields)
        ids = np.concatenate([out.sequences, new], axis=1)
        mask = np.pad(mask, ((0, 0), (0, 4)), constant_values=1)
        kept = {"max_new_tokens": 3, "past_key_values": out.past_key_values, **NO_EOS}
        actual = jaxllm.generate(net, ids, mask, **kept)
    expected = jaxllm.generate(net, ids, mask, **fields)
    np.testing.assert_array_equal(actual.sequences, expected.sequences)
