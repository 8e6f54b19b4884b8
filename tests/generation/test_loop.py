"""The compiled programs: what compiles them again, and what they keep in place."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from conformance_runs import DATA, model
from generation_tools import (
    FAMILIES,
    cache_copies,
    compilations,
    loop_is_in_place,
    prompts,
    started,
)

import jaxllm
from jaxllm.generation.loop import decode_program


@pytest.mark.ci
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_seeds_and_lengths_compile_nothing(name):
    net = model(name)

    def run(length, new, seed, **numbers):
        _, ids, mask = prompts(name, (length, 3, 4), seed=seed)
        fields = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "eos_token_id": [5, 6]}
        fields |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 2}
        fields |= {"suppress_tokens": [9], "bad_words_ids": [[7, 8], [10]], **numbers}
        return jaxllm.generate(
            net, ids, mask, do_sample=True, key=seed, max_new_tokens=new, **fields
        )

    assert compilations(lambda: run(7, 9, 0)) != []
    calls = [
        lambda: run(7, 9, 1),
        lambda: run(9, 9, 2),  # another prompt length in the bucket
        lambda: run(7, 15, 3),  # more new tokens, in the bucket
        lambda: run(7, 9, 4, temperature=1.0, top_k=0, top_p=1.0),
        lambda: run(7, 9, 5, eos_token_id=[3, 4, 11, 12], repetition_penalty=1.0),
        lambda: run(7, 9, 6, eos_token_id=None),
        lambda: run(7, 9, 7, no_repeat_ngram_size=2, min_new_tokens=5, suppress_tokens=[1, 2, 3]),
        lambda: run(7, 9, 8, bad_words_ids=[[13, 14], [15]]),
    ]
    for call in calls:
        assert compilations(call) == []


@pytest.mark.ci
def test_two_models_of_one_config_share_their_programs():
    _, ids, mask = prompts("s_llama")
    first, second = (jaxllm.load(DATA / "models" / "s_llama")[0] for _ in range(2))
    second.generation_config = second.generation_config.replace(pad_token_id=3)
    jaxllm.generate(first, ids, mask, max_new_tokens=4)
    assert compilations(lambda: jaxllm.generate(second, ids, mask, max_new_tokens=4)) == []


@pytest.mark.by_default("4-s_llama")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_stream_equals_generate_and_shares_its_programs(name, chunk_size):
    _, ids, mask = prompts(name)
    fields = {"max_new_tokens": 11, "do_sample": True, "key": 3, "eos_token_id": None}
    full = jaxllm.generate(model(name), ids, mask, **fields).sequences
    chunks = []

    def run():
        chunks.extend(jaxllm.stream(model(name), ids, mask, chunk_size=chunk_size, **fields))

    assert compilations(run) == []
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), full[:, -11:])
    assert [c.shape[1] for c in chunks[:-1]] == [chunk_size] * (len(chunks) - 1)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "do_sample"), [("s_llama", True), ("s_t5_gated", False)])
def test_several_steps_between_checks_give_the_same_state(name, do_sample):
    _, ids, mask = prompts(name, (7, 3, 4))
    fields = {"do_sample": do_sample, "max_new_tokens": 12}
    free = jaxllm.generate(model(name), ids, mask, **fields, key=0, eos_token_id=None).sequences
    # Rows end at different steps, the last one in the middle of four.
    eos = [int(row[column]) for row, column in zip(free, (-9, -5, -3), strict=True)]

    def states(steps, max_length, **more):
        bare, call, state = started(name, ids, mask, **fields, **more)
        columns = (
            call.request.max_length if max_length is None else max_length + call.request.start_len
        )
        inputs = (call.strategy, bare, state, call.settings, np.int32(columns))
        return decode_program(*inputs, steps)

    for more, max_length in (({"eos_token_id": eos}, None), ({"eos_token_id": None}, 7)):
        one, four = states(1, max_length, **more), states(4, max_length, **more)
        assert (int(one.step) - 1) % 4 != 0
        length = int(one.cache.length)
        # The slot of the newest token is not in use: the next step writes it.
        used = [
            state.replace(
                keys=jax.random.key_data(state.keys) if do_sample else state.keys,
                cache=state.cache.replace(
                    layers=[layer.prefix(length) for layer in state.cache.layers]
                ),
            )
            for state in (one, four)
        ]
        jax.tree.map(np.testing.assert_array_equal, *used)


@pytest.mark.ci
@pytest.mark.parametrize("name", FAMILIES)
def test_cache_is_donated_and_updated_in_place(name):
    _, ids, mask = prompts(name)
    assert loop_is_in_place(*started(name, ids, mask, max_new_tokens=40, eos_token_id=None))


def test_the_smallest_loops_copy_no_cache():
    """That of `generate`, and that of the batch engine."""
    config = tiny.CONFIGS["llama"] | {"num_hidden_layers": 1, "max_position_embeddings": 512}
    sizes = {"batch": 2, "prompt": 16, "new": 300, "slots": 4}  # several chunks
    plan = jaxllm.plan(config, "cpu", dtype="float32", program=("decode", "batch"), **sizes)
    copies = {program.name: program.cache_copies for program in plan.programs}
    assert copies == {"decode": 0, "batch.decode": 0, "batch.prefill": 0}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("s_llama", 1),
        ("s_llama", 3),
        ("s_gpt2", 3),
        ("s_t5_gated", 1),
        pytest.param("s_gpt2", 1, marks=pytest.mark.slow),
        pytest.param("s_t5_gated", 3, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_loop_copies_no_cache(name, batch):
    _, ids, mask = prompts(name, (7, 3, 5)[:batch])
    # The prediction: one token's worth of keys moves, never a layer's cache.
    assert cache_copies(*started(name, ids, mask, max_new_tokens=80, do_sample=True)) == []


@pytest.mark.ci
def test_settings_are_a_pytree_of_numbers():
    _, ids, mask = prompts("s_llama")
    _, call, _ = started("s_llama", ids, mask, do_sample=True, temperature=0.5)
    leaves = jax.tree.leaves(call.settings)
    assert all(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves)
    assert dataclasses.is_dataclass(call.settings)
