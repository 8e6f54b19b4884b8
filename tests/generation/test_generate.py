"""generate(): the reference's cases, padding, buckets, the caller's jit, ends and faults."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance_runs import DATA, cases, model, problems, run
from generation_tools import FAMILIES, prompts

import jaxllm
from jaxllm.common.errors import NonFiniteError

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


@pytest.mark.ci
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
    for row, expected in zip(rows, results[0], strict=True):
        single = jaxllm.generate(
            model(name), row[None], max_new_tokens=9, eos_token_id=None, no_repeat_ngram_size=2
        )
        np.testing.assert_array_equal(single.sequences[0, -9:], expected)


@pytest.mark.ci
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
        full = np.concatenate([mask, np.ones((len(ids), 12), int)], axis=1)
        logits = net(out, full).logits
        np.testing.assert_array_equal(np.argmax(logits, -1)[:, ids.shape[1] - 1 : -1], out[:, 7:])


@pytest.mark.by_default("s_llama")
@pytest.mark.parametrize("name", FAMILIES)
def test_inside_the_callers_jit(name):
    net = model(name)
    _, ids, mask = prompts(name)
    card, fields = net.card, {"max_new_tokens": 8, "do_sample": True}

    @jax.jit
    def call(net, ids, mask, key, temperature):
        return jaxllm.generate(
            net.with_card(card), ids, mask, key=key, temperature=temperature, **fields
        ).sequences

    actual = call(net, ids, mask, jax.random.key(5), 0.8)
    expected = jaxllm.generate(
        net, ids, mask, key=jax.random.key(5), temperature=0.8, **fields
    ).sequences
    np.testing.assert_array_equal(np.asarray(actual)[:, : expected.shape[1]], expected)


def test_a_model_that_the_callers_jit_closes_over():
    net = model("s_llama")
    padded = np.array([[0, 0, 5, 6], [9, 8, 7, 6]])  # whose mask is inferred, there as here

    @jax.jit
    def call(ids):
        return jaxllm.generate(net, ids, max_new_tokens=5, eos_token_id=2).sequences

    expected = jaxllm.generate(net, padded, max_new_tokens=5, eos_token_id=2).sequences
    np.testing.assert_array_equal(np.asarray(call(padded))[:, : expected.shape[1]], expected)


@pytest.mark.ci
@pytest.mark.parametrize("name", FAMILIES)
def test_64_bit_mode(name):
    _, ids, mask = prompts(name)
    expected = jaxllm.generate(model(name), ids, mask, max_new_tokens=5).sequences
    with jax.enable_x64(True):
        actual = jaxllm.generate(model(name), ids, mask, max_new_tokens=5).sequences
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.ci
def test_finished_rows_get_pads_and_length_is_the_longest_row():
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


@pytest.mark.ci
def test_logits_of_a_row_beside_one_that_has_ended():
    """Raw logits are those of an uncached pass over the row alone, up to its own end."""
    net = model("s_llama")
    rows, ids, mask = prompts("s_llama")
    fields = {"max_new_tokens": 9, "repetition_penalty": 1.3, "output_logits": True}
    free = jaxllm.generate(net, ids, mask, eos_token_id=None, **fields).sequences[:, 7:]
    stop = next(int(token) for token in free[0, 2:] if token not in free[1:])
    out = jaxllm.generate(net, ids, mask, eos_token_id=stop, pad_token_id=77, **fields)
    lengths = [np.flatnonzero([*(row == stop), True])[0] + 1 for row in free]
    assert lengths[0] < 10 == lengths[1]
    logits = np.stack(out.logits, axis=1)
    for prompt, tokens, length, raw in zip(rows, free, lengths, logits, strict=True):
        own = tokens[: length - 1]
        alone = net(np.concatenate([prompt, own])[None]).logits[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(raw[: len(own)], alone, atol=2e-4)


@pytest.mark.ci
def test_processors_of_the_caller():
    """A callable and a pytree, in HF's Flax calling convention."""
    _, ids, mask = prompts("s_llama")

    def only_even(input_ids, scores, cur_len):
        return jnp.where(jnp.arange(scores.shape[-1]) % 2 == 0, scores, -jnp.inf)

    out = jaxllm.generate(
        model("s_llama"), ids, mask, max_new_tokens=8, logits_processor=[only_even]
    ).sequences
    assert (out[:, 7:] % 2 == 0).all()


@pytest.mark.ci
def test_non_finite_logits_name_step_and_row():
    net = jaxllm.load(DATA / "models" / "s_llama")[0]
    free = jaxllm.generate(net, [[5, 6, 7]], max_new_tokens=6, eos_token_id=None).sequences[0]
    table = np.array(net.backbone.embed.weight[...])
    table[free[5]] = np.nan  # the third new token: its own step's logits are fine, the next are not
    net.backbone.embed.weight[...] = jnp.asarray(table)
    with pytest.raises(NonFiniteError, match=r"new token \d+ of row 0"):
        jaxllm.generate(net, [[5, 6, 7]], max_new_tokens=6, eos_token_id=None)


@pytest.mark.ci
def test_a_step_with_every_token_forbidden_is_an_error():
    with pytest.raises(NonFiniteError, match="forbid every token"):
        jaxllm.generate(model("s_llama"), [[5]], suppress_tokens=list(range(131)))


@jax.jit
def best_tokens(net, ids, mask, decoder_ids):
    """Argmax at every position of one uncached forward pass."""
    inputs = (ids, mask, decoder_ids) if net.is_encoder_decoder else (ids, mask)
    return jnp.argmax(net(*inputs).logits, axis=-1)


@pytest.mark.ci
@pytest.mark.parametrize("name", FAMILIES)
def test_random_lengths_equal_an_uncached_pass(name):
    """Bucketed == exact, for 60 random pairs of prompt length and new tokens."""
    net, rng = model(name), np.random.default_rng(1)
    for _ in range(60):
        length, new = int(rng.integers(1, 30)), int(rng.integers(1, 20))
        ids = rng.integers(3, net.config.vocab_size - 1, (1, length))
        out = jaxllm.generate(net, ids, max_new_tokens=new, eos_token_id=None).sequences
        full = np.pad(ids if net.is_encoder_decoder else out, ((0, 0), (0, 64)))[:, :64]
        real = np.arange(64) < (length if net.is_encoder_decoder else out.shape[1])
        decoder = np.pad(out, ((0, 0), (0, 64)))[:, :32]
        best = np.asarray(best_tokens(net, full, real[None], decoder))[0]
        first = 0 if net.is_encoder_decoder else length - 1
        np.testing.assert_array_equal(best[first : first + new], out[0, -new:])
