"""score(): against plain forward passes, whatever the batch, the padding and the form."""

from __future__ import annotations

import conformance_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import program_count
from paths import DATA

import jaxllm
from jaxllm.common.errors import InputError, NonFiniteError
from jaxllm.generation import scoring as module

REFERENCE = DATA / "reference"
LENGTHS = ((12, 1), (1, 19), (3, 4))


def pairs(seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    rng = np.random.default_rng(seed)
    rows = [[rng.integers(3, 50, n).tolist() for n in lengths] for lengths in LENGTHS]
    return [row[0] for row in rows], [row[1] for row in rows]


def padded(rows: list[list[int]], side: str) -> tuple[np.ndarray, np.ndarray]:
    width = max(map(len, rows))
    ids, mask = np.zeros((len(rows), width), int), np.zeros((len(rows), width), int)
    for i, row in enumerate(rows):
        index = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, index], mask[i, index] = row, 1
    return ids, mask


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equals_a_forward_pass(family):
    """The log-softmax of one plain call of the model over all pairs, padded on the right."""
    model, (prompts, completions) = tiny.cached(family), pairs()
    out = jaxllm.score(model, prompts, completions)
    assert out.log_likelihoods.dtype == np.float32
    assert out.is_greedy.dtype == bool
    if family == "t5":
        sides, _ = padded([[0, *completion] for completion in completions], "right")
        logits = model(*padded(prompts, "right"), decoder_input_ids=sides).logits
    else:
        full = [p + c for p, c in zip(prompts, completions, strict=True)]
        logits = model(*padded(full, "right")).logits
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first = 0 if family == "t5" else len(prompt) - 1
        expected = log_probs[i, first + np.arange(len(completion)), completion]
        np.testing.assert_allclose(out.token_log_probs[i], expected, atol=2e-5)
        np.testing.assert_allclose(out.log_likelihoods[i], expected.sum(), rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_is_what_generate_gives(family):
    model, (prompts, _) = tiny.cached(family), pairs()
    ids, mask = padded(prompts, "left")
    new = jaxllm.generate(model, ids, mask, max_new_tokens=4, eos_token_id=None).sequences
    completions = new[:, -4:].tolist()
    changed = [[*c[:-1], (c[-1] + 1) % 50] for c in completions]
    out = jaxllm.score(model, prompts * 2, completions + changed)
    assert out.is_greedy.tolist() == [True] * 3 + [False] * 3


@pytest.mark.in_ci("left-llama", "left-t5")
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_arrays_equal_lists(family, side):
    model, (prompts, completions) = tiny.cached(family), pairs()
    expected = jaxllm.score(model, prompts, completions)

    (ids, mask), (targets, target_mask) = padded(prompts, side), padded(completions, side)
    ids = jnp.asarray(ids)
    out = jaxllm.score(model, ids, targets, attention_mask=mask, completion_mask=target_mask)
    np.testing.assert_array_equal(out.log_likelihoods, expected.log_likelihoods)
    np.testing.assert_array_equal(out.is_greedy, expected.is_greedy)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_results_do_not_depend_on_the_batch(family):
    model, (prompts, completions) = tiny.cached(family), pairs()
    together = jaxllm.score(model, prompts, completions)
    out = jaxllm.score(model, prompts, completions, batch_size=2)
    np.testing.assert_allclose(out.log_likelihoods, together.log_likelihoods, atol=1e-5)


@pytest.mark.ci
def test_logits_in_blocks(monkeypatch):
    prompts, completions = pairs(1)
    model = tiny.make("llama", seed=1)
    full = jaxllm.score(model, prompts, completions, batch_size=3)
    monkeypatch.setattr(module, "MOST_LOGIT_BYTES", 4 * 50 * 4 * 8)
    jax.clear_caches()
    blocks = jaxllm.score(model, prompts, completions, batch_size=3)
    np.testing.assert_allclose(blocks.log_likelihoods, full.log_likelihoods, atol=1e-5)
    np.testing.assert_array_equal(blocks.is_greedy, full.is_greedy)


@pytest.mark.ci
def test_an_empty_prompt_is_bos():
    model = tiny.cached("llama")
    out = jaxllm.score(model, [[], [1]], [[5, 6], [5, 6]])
    assert out.log_likelihoods[0] == out.log_likelihoods[1]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-t5-v1_1"])
@pytest.mark.usefixtures("highest_precision")
def test_reference_logits(name):
    """The reference's own logits give the log-likelihoods."""
    model, _ = jaxllm.load(REFERENCE / name)
    data = np.load(REFERENCE / f"{name}.npz")
    mask = data["attention_mask"].astype(bool)
    log_probs = np.asarray(jax.nn.log_softmax(data["logits"], axis=-1))
    for row in range(3):
        ids = data["input_ids"][row]
        if model.is_encoder_decoder:
            text, prompt = data["decoder_input_ids"][row], ids[mask[row]]
            completion, index = text[1:], np.arange(len(text) - 1)
        else:
            real = np.flatnonzero(mask[row])
            prompt, completion, index = ids[real[:2]], ids[real[2:]], real[1:-1]
        out = jaxllm.score(model, [prompt], [completion])
        expected = log_probs[row, index, completion]
        np.testing.assert_allclose(out.token_log_probs[0], expected, atol=1e-4)
        assert out.is_greedy[0] == (log_probs[row, index].argmax(-1) == completion).all()


def test_errors_name_the_pair():
    model = tiny.cached("llama")
    with pytest.raises(InputError, match=r"completions\[1\]: empty"):
        jaxllm.score(model, [[3], [4]], [[5], []])
    with pytest.raises(InputError, match=r"prompts\[1\]: id 50 "):
        jaxllm.score(model, [[3], [50]], [[5], [5]])
    with pytest.raises(InputError, match="completions: 1 for 2 prompts"):
        jaxllm.score(model, [[3], [4]], [[5]])
    with pytest.raises(InputError, match=r"completions\[0\]: expected a list of token ids"):
        jaxllm.score(model, [[3]], [[0.5]])
    with pytest.raises(InputError, match=r"attention_mask\[0\]: expected shape \(2,\)"):
        jaxllm.score(model, [[3, 4]], [[5]], attention_mask=np.ones((1, 3)))
    with pytest.raises(InputError, match="batch_size"):
        jaxllm.score(model, [[3]], [[5]], batch_size=0)
    with pytest.raises(InputError, match=r"prompts\[0\]: empty; the encoder"):
        jaxllm.score(tiny.cached("t5"), [[]], [[5]])
    with pytest.raises(InputError, match=r"prompts\[0\]: 66 tokens .* 64 positions"):
        jaxllm.score(tiny.cached("gpt2"), [[3] * 60], [[5] * 6])
    with pytest.raises(InputError, match=r"outside jax\.jit"):
        jax.jit(lambda x: jaxllm.score(model, x, [[5]]).log_likelihoods)(jnp.ones((1, 2), int))


def test_nan_logits_are_named():
    model = tiny.make("llama")
    model.lm_head.weight[...] = model.lm_head.weight[...] * jnp.nan
    with pytest.raises(NonFiniteError, match="pair 1"):
        jaxllm.score(model, [[3], [4, 5]], [[5], [6, 7]])


@pytest.mark.ci
def test_buckets_compile_nothing_anew():
    model = tiny.cached("gpt2")
    jaxllm.score(model, [[3, 4]] * 3, [[5]] * 3)
    size = program_count(module._score_batch)
    jaxllm.score(model, [[3, 4, 5]] * 4, [[5, 6]] * 4)
    assert program_count(module._score_batch) == size


@pytest.mark.ci
def test_the_conformance_tokens_are_greedy():
    """Tokens that the reference chose greedily are greedy here, also of left-padded rows."""
    for name in ("s-outputs-hidden-attn", "s-outputs-hidden-attn-t5"):
        case = conformance_runs.cases()[name]
        model = conformance_runs.model(case["model"])
        ids, mask = (np.array(case["inputs"][n]) for n in ("input_ids", "attention_mask"))
        first = 1 if model.is_encoder_decoder else ids.shape[1]
        new = [row[first:] for row in case["expected"]["sequences"]]
        eos = model.generation_config.eos_token_id
        new = [row[: row.index(eos) + 1] if eos in row else row for row in new]
        assert jaxllm.score(model, ids, new, attention_mask=mask).is_greedy.all()
