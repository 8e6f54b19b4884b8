"""DoLa: the reference's cases, which layers, whose say, sampling, padding, the edges."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conformance_runs import cases, model, problems, run
from generation_tools import compilations, prompts

import jaxllm
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.strategies.dola import contrast, farthest, layers_to_contrast

CASES = [case for case in cases().values() if case["mode"] == "dola"]
DEEP, TIED = "s_llama_deep", "s_gpt2_scaled"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_conformance(case):
    assert problems(case, run(case, output_scores=True)) == []


def test_number_of_conformance_cases():
    assert len(CASES) == 3


def generate(name, ids, mask=None, **fields):
    fields = {"dola_layers": "low", "eos_token_id": None, "max_new_tokens": 9, **fields}
    return jaxllm.generate(model(name), ids, mask, **fields)


@pytest.mark.ci
def test_left_padded_equals_right_padded_equals_uncached():
    """Every new token is the best by the rule, from one forward pass over all before it."""
    name, layers, results = TIED, [0, 1], []
    net = model(name)
    for side in ("left", "right"):
        _, ids, mask = prompts(name, side=side)
        out = generate(name, ids, mask, dola_layers=layers, repetition_penalty=1.0)
        results.append(out.sequences)
    np.testing.assert_array_equal(results[0][:, -9:], results[1][:, -9:])
    _, ids, mask = prompts(name)
    full = np.concatenate([mask, np.ones((3, 9), int)], axis=1)
    read = net(results[0], full, output_hidden_states=True)
    for column in range(6, 15):
        early = jnp.stack([net.logits(read.hidden_states[i][:, column]) for i in layers])
        final = read.logits[:, column]
        scores = contrast(final, farthest(final, early, jnp.ones(3, bool)))
        np.testing.assert_array_equal(jnp.argmax(scores, axis=-1), results[0][:, column + 1])


@pytest.mark.ci
def test_with_one_layer_rows_do_not_depend_on_each_other():
    rows, ids, mask = prompts(DEEP)
    out = generate(DEEP, ids, mask, dola_layers=[3]).sequences[:, -9:]
    for row, expected in zip(rows, out, strict=True):
        single = generate(DEEP, row[None], dola_layers=[3]).sequences
        np.testing.assert_array_equal(single[0, -9:], expected)


@pytest.mark.ci
def test_the_farthest_layer_is_that_of_the_live_rows():
    final = jnp.zeros((2, 3))
    near, far = jnp.array([[0.1, 0.0, 0.0], [9.0, 0.0, 0.0]]), jnp.array([[2.0, 0.0, 0.0]] * 2)
    early = jnp.stack([near, far])
    both, first = jnp.array([True, True]), jnp.array([True, False])
    np.testing.assert_array_equal(farthest(final, early, both), near)
    np.testing.assert_array_equal(farthest(final, early, first), far)


@pytest.mark.ci
def test_finished_rows_do_not_choose_the_layer():
    _, ids, mask = prompts(DEEP, (7, 5))
    layers = [0, 2, 4]
    free = generate(DEEP, ids, mask, dola_layers=layers).sequences
    stop = int(free[0, 7])
    assert stop not in free[1, 7:]
    out = generate(DEEP, ids, mask, dola_layers=layers, eos_token_id=stop).sequences
    # Row 1 goes on as if alone from the second token on.
    prompt = np.concatenate([ids[1:, 2:], out[1:, 7:8]], axis=1)
    single = generate(DEEP, prompt, dola_layers=layers, eos_token_id=stop, max_new_tokens=8)
    np.testing.assert_array_equal(single.sequences[0, 6 : out.shape[1] - 2], out[1, 8:])


@pytest.mark.slow
def test_sampling_by_key_and_several_results():
    _, ids, mask = prompts(DEEP)
    fields = {"do_sample": True, "top_k": 0, "key": 3, "temperature": 8.0, "dola_layers": [3]}
    first, again = (generate(DEEP, ids, mask, **fields).sequences for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (generate(DEEP, ids, mask, **{**fields, "key": 4}).sequences != first).any()
    out = generate(DEEP, ids, mask, num_return_sequences=2, **fields).sequences
    np.testing.assert_array_equal(out[::2], first)
    assert (out[::2] != out[1::2]).any()


@pytest.mark.ci
def test_scores_are_differences_and_logits_those_of_the_last_layer():
    _, ids, mask = prompts(DEEP)
    out = generate(DEEP, ids, mask, max_new_tokens=3, output_scores=True, output_logits=True)
    expected = model(DEEP)(ids, mask).logits[:, -1]
    np.testing.assert_allclose(out.logits[0], expected, atol=1e-5)
    assert np.isneginf(out.scores[0]).any()
    assert (np.asarray(out.scores[0]) > 0).any()


@pytest.mark.ci
def test_numbers_and_lengths_compile_nothing():
    def run(length=7, new=9, **fields):
        _, ids, mask = prompts(DEEP, (length, 3, 4))
        fields = {"repetition_penalty": 1.2, "max_new_tokens": new, **fields}
        return generate(DEEP, ids, mask, **fields)

    run()
    assert compilations(lambda: run(9, 12, repetition_penalty=1.5, eos_token_id=[5, 6])) == []


@pytest.mark.ci
def test_inside_the_callers_jit_and_as_a_stream():
    _, ids, mask = prompts(DEEP)
    expected = generate(DEEP, ids, mask).sequences
    net = model(DEEP)
    fields = {"dola_layers": "low", "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 9}
    call = jax.jit(lambda net, ids, mask: jaxllm.generate(net, ids, mask, **fields).sequences)
    np.testing.assert_array_equal(call(net, ids, mask), expected)
    chunks = list(jaxllm.stream(net, ids, mask, chunk_size=4, **fields))
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), expected[:, 7:])


@dataclasses.dataclass
class Layers:
    """The part of a model that the choice of layers looks at."""

    depth: int
    tied_embedding: bool


@pytest.mark.parametrize(
    ("depth", "tied", "wanted", "layers"),
    [
        (6, False, "low", (0, 2)),
        (6, True, "low", (2,)),
        (4, True, "low", (2,)),
        (12, True, "low", (2, 4)),
        (2, True, "low", (1,)),
        (1, True, "low", (0,)),
        (6, False, "high", (3, 5)),
        (48, False, "low", tuple(range(0, 20, 2))),
        (48, True, "low", tuple(range(2, 20, 2))),
        (48, False, "high", tuple(range(28, 48, 2))),
        (6, False, [5, 0, 5], (5, 0)),
    ],
)
def test_layers(depth, tied, wanted, layers):
    assert layers_to_contrast(Layers(depth, tied), wanted) == layers


def test_layers_that_are_not_there():
    with pytest.warns(UserWarning, match="dola_layers"):
        assert layers_to_contrast(Layers(3, True), [1, 3, 7]) == (1,)
    with pytest.raises(InputError, match="leaves no layer"):
        layers_to_contrast(Layers(3, True), "low")


@pytest.mark.parametrize("value", ["middle", [], [-1], 3, [0.5]])
def test_bad_values_are_named(value):
    with pytest.raises(InputError, match="`dola_layers` must be 'low', 'high'"):
        generate(DEEP, [[5]], dola_layers=value)


def test_decoder_only():
    with pytest.raises(InputError, match="only available for decoder-only"):
        generate("s_t5_gated", [[5, 1]])


@pytest.mark.ci
def test_layers_wider_than_the_head_are_refused():
    """As those of OPT-350M."""
    with pytest.raises(UnsupportedError, match="dola_layers: the LM head reads 24 features, but"):
        jaxllm.generate(tiny.cached("opt"), [[5]], dola_layers="high", max_new_tokens=2)


@pytest.mark.ci
def test_a_traced_list_is_refused():
    model(DEEP)  # loaded and kept here, since loading is not traced
    with pytest.raises(InputError, match="dola_layers"):
        jax.jit(lambda i: generate(DEEP, [[5]], dola_layers=[i]).sequences)(1)
