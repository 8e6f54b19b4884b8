"""The rule of acceptance: samples are distributed as the model's, whatever drafted them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import model
from generation_tools import drafts, repeating_prompts
from tiny import make

import jaxllm
from jaxllm.generation.processors import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from jaxllm.generation.strategies.assisted import DRAFT, accept_speculative, position_keys
from jaxllm.generation.strategies.drafts import DraftTokens
from jaxllm.generation.strategies.draws import choose_sample, row_keys


@pytest.mark.slow
def test_samples_of_a_lookup_are_those_of_plain_sampling():
    """Drafts without a distribution are held against the very draws of plain sampling."""
    ids, mask = repeating_prompts()
    fields = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "key": 3, "max_new_tokens": 28}
    expected = jaxllm.generate(model("s_llama_loop"), ids, mask, **fields).sequences
    out = jaxllm.generate(model("s_llama_loop"), ids, mask, **fields, prompt_lookup_num_tokens=5)
    np.testing.assert_array_equal(out.sequences, expected)
    assert out.assisted.accepted.sum() > 0


@pytest.mark.ci
def test_a_rows_samples_depend_on_its_key_and_id_only():
    """The same row, in two batches and at two places, is drafted and sampled alike."""
    ids, mask = repeating_prompts()
    others, holes = repeating_prompts(seed=1)
    fields = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": [31], "key": 7}
    fields |= {**drafts("s_llama")["assistant"], "num_return_sequences": 2}
    first = jaxllm.generate(model("s_llama"), ids, mask, row_ids=[0, 1, 2], **fields)
    ids = np.stack([others[2], ids[2], ids[1]])
    mask = np.stack([holes[2], mask[2], mask[1]])
    second = jaxllm.generate(model("s_llama"), ids, mask, row_ids=[9, 2, 1], **fields)
    width = min(first.sequences.shape[1], second.sequences.shape[1])
    for old, new in ((2, 4), (3, 5), (4, 2), (5, 3)):
        np.testing.assert_array_equal(first.sequences[old, :width], second.sequences[new, :width])
        assert first.assisted.drafted[old] == second.assisted.drafted[new]
    assert (first.sequences[0] != first.sequences[1]).any()


@pytest.mark.by_default("None")
@pytest.mark.parametrize("weight", [None, np.float32(0.4)])
def test_the_rule_of_acceptance_keeps_the_distribution(weight):
    """Distribution of each token given that those before it were kept, over 40,000 rows.

    With a weight a token is distributed as the mixture where there was a draft for it.
    """
    rng, rows, size, most = np.random.default_rng(0), 40_000, 6, 2
    p_scores, q_scores = rng.normal(0, 2, (2, most + 1, size)).astype(np.float32)
    p_scores[0, 2] = p_scores[1, 0] = -np.inf  # forbidden, though drafts have them
    keys = row_keys(0, None, rows, 1, sampling=True, under_jit=False)

    @jax.jit
    def run(keys):
        q = jnp.broadcast_to(q_scores[:most], (rows, most, size))
        draws = [
            choose_sample(position_keys(keys, jnp.full((rows,), i), DRAFT), q[:, i])
            for i in range(most)
        ]
        count = jnp.arange(rows) % (most + 1)
        drafted = DraftTokens(jnp.stack(draws, axis=1), count, q)
        p = jnp.broadcast_to(p_scores, (rows, most + 1, size))
        return (*accept_speculative(keys, jnp.zeros(rows, jnp.int32), drafted, p, weight), count)

    tokens, kept, count = (np.asarray(x) for x in run(keys))
    p, q = (np.asarray(jax.nn.softmax(jnp.asarray(s))) for s in (p_scores, q_scores))
    for i in range(most + 1):
        reached = kept >= i
        reference = p[i]
        if weight is not None:
            reached = (kept >= i) & (count > i if i < most else True)
            reference = weight * p[i] + (1 - weight) * q[i] if i < most else p[i]
        observed = np.bincount(tokens[reached, i], minlength=size)
        expected = reached.sum() * reference
        assert observed[reference == 0].sum() == 0
        z = (observed - expected) / np.sqrt(expected * (1 - reference) + 1e-9)
        assert np.abs(z).max() < 4.5
    # The share of drafts that are kept is that of the papers, 1 - TV(p, q).
    tried = count >= 1
    share = (kept[tried] >= 1).mean()
    judge = p[0] if weight is None else weight * p[0] + (1 - weight) * q[0]
    assert abs(share - np.minimum(judge, q[0]).sum()) < 0.015


def joint(net, prompt: list[int], steps: int, processors) -> np.ndarray:
    """Exact probabilities of all continuations of `steps` tokens."""
    size = net.config.vocab_size
    probabilities = np.ones(())
    for step in range(steps):
        texts = np.array([prompt + list(t) for t in itertools.product(range(size), repeat=step)])
        logits = net(texts).logits[:, -1]
        scores = processors(texts, logits, texts.shape[1])
        p = np.asarray(jax.nn.softmax(scores, axis=-1)).reshape((size,) * (step + 1))
        probabilities = probabilities[..., None] * p
    return probabilities


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["assistant", "early exit"])
def test_samples_are_distributed_as_the_models(draft):
    """Every text of three tokens over a vocabulary of 7, warpers on, against enumeration."""
    net, assistant = make("llama", vocab_size=7), make("llama", vocab_size=7, seed=1)
    fields = {"assistant_model": assistant} if draft == "assistant" else {"assistant_early_exit": 1}
    fields |= {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.3}
    prompt, rows = [3, 5, 1, 4], 8_000
    out = jaxllm.generate(
        net,
        [prompt],
        do_sample=True,
        temperature=1.3,
        top_p=0.95,
        top_k=0,
        key=5,
        max_new_tokens=5,
        eos_token_id=None,
        num_return_sequences=rows,
        **fields,
    )
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.95)])
    exact = joint(net, prompt, 3, processors)
    observed = np.zeros_like(exact)
    np.add.at(observed, tuple(out.sequences[:, 4:7].T), 1)
    assert observed[exact == 0].sum() == 0
    counts = out.assisted
    assert 0.1 < counts.accepted.sum() / counts.drafted.sum() < 0.95
    for axes in ((), (2,), (1, 2), (0,), (0, 1)):  # marginals see small shifts best
        expected, actual = rows * exact.sum(axes), observed.sum(axes)
        cells = expected >= 5
        z = (actual - expected)[cells] / np.sqrt(expected * (1 - expected / rows) + 1e-9)[cells]
        assert np.abs(z).max() < 4.5
