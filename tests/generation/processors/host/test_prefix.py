"""Constraints by a Python function: the reference's case, errors, padding, and no recompilation."""

from __future__ import annotations

import gc
import json
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import paths
import pytest
from compiling import program_count

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.generation.processors.host import (
    _RULES,
    PrefixConstrainedLogitsProcessor,
    reraise_failures,
)

DATA = paths.DATA / "conformance"
sys.path.insert(0, str(DATA))
import compare  # noqa: E402

CASES = {case["id"]: case for case in json.loads((DATA / "cases.json").read_text())["cases"]}
IDS = np.array([[5, 6, 7], [8, 9, 3]], np.int32)


@pytest.fixture(scope="module")
def model():
    return jaxllm.load(DATA / "models" / "s_llama")[0]


def rule_of(case, vocab_size):
    a, b, c, d, m, kept = (case["prefix_rule"][name] for name in "abcdmS")

    def allowed(batch_id, ids):
        start = b * ids[-1] + c * batch_id + d * len(ids)
        return [t for t in range(vocab_size) if (a * t + start) % m in kept]

    return allowed


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3, "prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_the_function_gets_the_number_of_the_prompt(fields, model):
    """As in transformers 5.24, also with several samples of each prompt."""
    rows = set()

    def allowed(batch_id, ids):
        rows.add((batch_id, *ids[:3].tolist()))
        return [10 + batch_id, 20 + batch_id]

    ends = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    out = jaxllm.generate(model, IDS, prefix_allowed_tokens_fn=allowed, **ends, **fields)
    assert rows == {(0, 5, 6, 7), (1, 8, 9, 3)}
    results = len(out.sequences) // 2
    new = np.asarray(out.sequences)[:, 3:].reshape(2, -1)
    assert results == fields.get("num_return_sequences", 1)
    assert [set(row.tolist()) <= {10 + n, 20 + n} for n, row in enumerate(new)] == [True, True]


def program(processor, ids, scores, cur_len, kwargs):
    return processor(ids, scores, cur_len, **kwargs)


@pytest.fixture
def run():
    # Of its own cache, so that a test may count what it compiles.
    return jax.jit(lambda *args: program(*args))


def test_conformance(model):
    case = CASES["s-proc-prefix-allowed"]
    processor = PrefixConstrainedLogitsProcessor(rule_of(case, model.config.vocab_size), 1)
    inputs = {name: np.array(value) for name, value in case["inputs"].items()}
    settings = {**case["generate_kwargs"], "logits_processor": [processor]}
    out = jaxllm.generate(model, **inputs, **settings, output_scores=True)
    scores = np.stack(out.scores, axis=1)
    new = out.sequences[:, -scores.shape[1] :]
    actual = {
        "sequences": out.sequences.tolist(),
        "step_token_scores": np.take_along_axis(scores, new[..., None], 2)[..., 0].tolist(),
    }
    assert compare.check(case, actual, atol=1e-4) == []
    pieces = np.concatenate(list(jaxllm.stream(model, **inputs, **settings)), axis=1)
    np.testing.assert_array_equal(pieces, new)


@pytest.mark.ci
def test_right_padding_is_left_padding(model):
    def rule(batch_id, ids):
        return [(3 * ids[-1] + len(ids)) % 90 + 2, 50 + batch_id]

    settings = {
        "max_new_tokens": 6,
        "logits_processor": [PrefixConstrainedLogitsProcessor(rule, 1)],
    }
    rows = {
        side: jaxllm.generate(model, np.array(ids), np.array(mask), **settings).sequences[:, 4:]
        for side, ids, mask in (
            ("left", [[5, 6, 7, 8], [0, 0, 9, 4]], [[1, 1, 1, 1], [0, 0, 1, 1]]),
            ("right", [[5, 6, 7, 8], [9, 4, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]]),
        )
    }
    np.testing.assert_array_equal(rows["left"], rows["right"])


@pytest.mark.ci
def test_inside_the_callers_jit_a_processor_made_there_stays_alive(model):
    @jax.jit
    def start(ids):
        processor = PrefixConstrainedLogitsProcessor(lambda i, ids: [ids[-1] + 1], 1)
        return jaxllm.generate(
            model, ids, max_new_tokens=4, logits_processor=[processor], attention_mask=ids >= 0
        ).sequences

    compiled = start.lower(jnp.asarray(IDS)).compile()
    gc.collect()
    expected = [[5, 6, 7, 8, 9, 10, 11], [8, 9, 3, 4, 5, 6, 7]]
    assert compiled(jnp.asarray(IDS)).tolist() == expected


@pytest.mark.ci
def test_another_function_compiles_nothing_and_is_forgotten_with_its_processor(run):
    known = len(_RULES)
    for token in range(4):
        processor = PrefixConstrainedLogitsProcessor(lambda i, ids, token=token: [token], 1)
        actual = run(processor, IDS, np.zeros((2, 4), np.float32), 3, {})
        assert (np.asarray(actual) == 0).nonzero()[1].tolist() == [token, token]
    assert program_count(run) == 1
    del processor
    gc.collect()
    assert len(_RULES) == known


@pytest.mark.ci
def test_a_processor_that_is_gone_is_named(run):
    leaves, tree = jax.tree.flatten(PrefixConstrainedLogitsProcessor(lambda i, ids: [1], 1))
    gc.collect()
    copy = jax.tree.unflatten(tree, leaves)
    with pytest.raises(InputError, match="no longer exists"), reraise_failures():
        jax.block_until_ready(run(copy, IDS, np.zeros((2, 4), np.float32), 3, {}))


def test_what_the_function_sees(run):
    seen = []

    def spy(batch_id, ids):
        assert ids.dtype == np.int64
        seen.append((batch_id, ids.tolist()))
        return np.array([1])

    processor = PrefixConstrainedLogitsProcessor(spy, 2)
    ids = np.array([[1, 2, 3, 4, 99], [0, 2, 3, 4, 99], [1, 0, 0, 4, 99], [1, 2, 3, 0, 99]])
    mask = np.array([[1, 1, 1, 1, 0], [0, 1, 1, 1, 0], [1, 0, 0, 1, 0], [1, 1, 1, 0, 0]], bool)
    scores = np.zeros((4, 2), np.float32)
    actual = run(processor, ids, scores, 4, {"mask": mask, "prompt_len": 3})
    assert seen == [(0, [1, 2, 3, 4]), (0, [0, 2, 3, 4]), (1, [0, 0, 1, 4])]
    assert actual.tolist() == [[-np.inf, 0]] * 3 + [[0, 0]]  # the last row has ended
    seen.clear()
    run(processor, ids, scores, np.array([1, 2, 3, 4]), {})
    assert seen == [(0, [1]), (0, [0, 2]), (1, [1, 0, 0]), (1, [1, 2, 3, 0])]


def test_the_function_wins_where_nothing_else_is_left(run):
    processor = PrefixConstrainedLogitsProcessor(lambda i, ids: [0], 2)
    gone = -np.inf
    scores = np.array([[gone, 1], [2, 1], [gone, 1], [gone, gone]], np.float32)
    ids = np.zeros((4, 1), np.int32)
    actual = run(processor, ids, scores, 1, {})
    assert actual.tolist() == [[gone, gone], [2, gone], [0, gone], [0, gone]]


@pytest.mark.ci
def test_under_vmap():
    processor = PrefixConstrainedLogitsProcessor(lambda i, ids: [ids[-1]], 1)
    scores = jnp.zeros((2, 1, 12))
    actual = jax.vmap(lambda ids, s: processor(ids[None], s, 3))(IDS, scores)
    assert (actual[:, 0] == 0).nonzero()[1].tolist() == [7, 3]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], r"returned no token for prompt 1 after \[8, 9, 3\]"),
        ([4], "ids from 0 to 3 for prompt 1, found"),
        ([-1], "ids from 0 to 3"),
        ([0.5], "ids from 0 to 3"),
        ([[1], [2]], r"ids from 0 to 3 for prompt 1, found \[\[1\], \[2\]\]"),
        ([[1], [2, 3]], "ids from 0 to 3"),
    ],
)
def test_errors_of_an_answer(run, caplog, answer, message):
    processor = PrefixConstrainedLogitsProcessor(lambda i, ids: [1] if i == 0 else answer, 1)
    arguments = (processor, IDS, np.zeros((2, 4), np.float32), 3, {})
    with caplog.at_level(logging.ERROR):
        with pytest.raises(InputError, match=message), reraise_failures():
            jax.block_until_ready(run(*arguments))
        assert caplog.text == ""
        # Without help the message still reaches the caller, as the end of JAX's.
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(run(*arguments))
        assert "pure_callback failed" in caplog.text


@pytest.mark.ci
def test_an_error_of_the_function_comes_out_of_generate(model):
    class OwnError(Exception):
        pass

    def fails(batch_id, ids):
        if len(ids) == 5:
            raise OwnError("after two tokens")
        return [3]

    processors = [PrefixConstrainedLogitsProcessor(fails, 1)]
    with pytest.raises(OwnError, match="after two tokens"), reraise_failures():
        jaxllm.generate(model, IDS, max_new_tokens=5, logits_processor=processors)
    other = [PrefixConstrainedLogitsProcessor(lambda i, ids: [4], 1)]
    out = jaxllm.generate(model, IDS, max_new_tokens=2, logits_processor=other)
    assert out.sequences[:, 3:].tolist() == [[4, 4]] * 2  # and the next call is well


@pytest.mark.by_default("tokens1")
@pytest.mark.parametrize("tokens", [[], [99]])
def test_outside_a_program_the_error_comes_at_once(tokens, caplog):
    processor = PrefixConstrainedLogitsProcessor(lambda i, ids: tokens, 1)
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="token"):
        processor(IDS, np.zeros((2, 4), np.float32))
    assert caplog.text == ""


def test_other_errors_of_jax_pass_through():
    def fails(x):
        raise ZeroDivisionError

    shape = jax.ShapeDtypeStruct((), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError"), reraise_failures():
        jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(fails, shape, x))(1.0))


def test_arguments_are_checked():
    with pytest.raises(InputError, match="prefix_allowed_tokens_fn: expected a function, found"):
        PrefixConstrainedLogitsProcessor([1], 1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="`num_beams`"):
        PrefixConstrainedLogitsProcessor(lambda i, ids: [1], 0)
    processor = PrefixConstrainedLogitsProcessor(lambda i, ids: [1], 3)
    with pytest.raises(InputError, match="do not divide into 3 beams"):
        processor(IDS, np.zeros((2, 4)), 3)
