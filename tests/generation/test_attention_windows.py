"""Layers with attention windows in every strategy, far beyond the window."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny
from batch_tools import differences, uneven_rows
from generation_tools import NO_EOS, padded, turns

import jaxllm
from jaxllm import BatchGenerator

pytestmark = pytest.mark.usefixtures("highest_precision")

SLOW = pytest.mark.slow
PROMPTS, NEW = turns(0, 2, 21), 10
STRATEGIES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0, "key": 1},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
}


def generated(family: str, **fields) -> tuple[jaxllm.generation.GenerateOutput, np.ndarray]:
    """The output, and the new tokens."""
    fields = {"max_new_tokens": NEW, **NO_EOS, **fields}
    out = jaxllm.generate(tiny.cached(family), *padded(PROMPTS), **fields)
    return out, np.asarray(out.sequences)[:, -NEW:]


def uncached(family: str, row: int, new: np.ndarray) -> np.ndarray:
    """Logits of the new tokens of one row alone, from one forward pass."""
    tokens = np.array([[*PROMPTS[row], *new[:-1]]])
    return tiny.logits(tiny.cached(family), tokens)[0, len(PROMPTS[row]) - 1 :]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        pytest.param(family, strategy, marks=[] if run else SLOW)
        for family, default in (
            ("mistral", ("sampling",)),
            ("qwen2", ("contrastive",)),
            ("qwen3", ("lookup",)),
            ("gemma3_text", ()),
        )
        for strategy in STRATEGIES
        for run in [strategy in default]
    ],
)
def test_scores_are_those_of_an_uncached_pass(family, strategy):
    out, new = generated(family, output_scores=True, **STRATEGIES[strategy])
    assert out.scores is not None
    for row, tokens in enumerate(new):
        scores = np.stack(out.scores)[:, row]
        np.testing.assert_allclose(scores, uncached(family, row, tokens), atol=3e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3", {}),
        ("gemma3_text", {}),
        pytest.param("mistral", {}, marks=SLOW),
        pytest.param("qwen2", {"num_beam_groups": 3, "diversity_penalty": 0.5}, marks=SLOW),
        pytest.param("mistral", {"force_words_ids": [[7, 9]]}, marks=SLOW),
    ],
)
def test_scores_of_beams_are_those_of_an_uncached_pass(family, fields):
    out, new = generated(family, num_beams=3, num_return_sequences=2, **fields)
    assert out.sequences_scores is not None
    for i, tokens in enumerate(new):
        log_p = jax.nn.log_softmax(uncached(family, i // 2, tokens), axis=-1)
        score = log_p[np.arange(NEW), tokens].sum() / NEW
        if "diversity_penalty" not in fields:
            np.testing.assert_allclose(out.sequences_scores[i], score, atol=1e-4)
        single = jaxllm.generate(
            tiny.cached(family),
            np.array([PROMPTS[i // 2]]),
            num_beams=3,
            num_return_sequences=2,
            max_new_tokens=NEW,
            **NO_EOS,
            **fields,
        )
        np.testing.assert_array_equal(np.asarray(single.sequences)[i % 2, -NEW:], tokens)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"do_sample": True}),
        pytest.param("gemma3_text", {}, marks=SLOW),
        pytest.param("qwen2", {}, marks=SLOW),
        pytest.param("qwen3", {"num_beams": 2}, marks=SLOW),
    ],
)
def test_batched_rows_equal_rows_alone(family, fields):
    net, rows = tiny.cached(family), uneven_rows(8, prompts=14, new=12)
    engine = BatchGenerator(net, slots=4, seed=7, **fields)
    outputs = engine.generate(rows)
    wrong, _ = differences(net, rows, outputs, seed=7, **fields)
    assert wrong == []


@pytest.mark.ci
def test_a_conversation_goes_on_from_its_cache():
    net, (ids, mask) = tiny.cached("mistral"), padded(turns(0, 6, 3))
    fields = {"max_new_tokens": 6, **NO_EOS}
    out = jaxllm.generate(net, ids, mask, return_past_key_values=True, **fields)
    ids = np.concatenate([out.sequences, np.array(turns(1, 2, 2))], axis=1)
    mask = np.pad(mask, ((0, 0), (0, 8)), constant_values=1)
    kept = jaxllm.generate(net, ids, mask, past_key_values=out.past_key_values, **fields)
    full = jaxllm.generate(net, ids, mask, **fields)
    np.testing.assert_array_equal(kept.sequences, full.sequences)


@pytest.mark.ci
def test_a_cache_window_wider_than_the_layers_changes_nothing():
    """All layers of Mistral have the window 4."""
    cache = {"cache_implementation": "sliding_window", "cache_config": {"sliding_window": 6}}
    _, new = generated("mistral", **cache)
    _, plain = generated("mistral")
    np.testing.assert_array_equal(new, plain)
