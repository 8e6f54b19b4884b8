"""Many calls of generate(): from two threads, of many lengths, and without growth."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import tiny
from compiling import program_count

import jaxllm
from jaxllm.generation import loop

PROGRAMS = (loop.prefill_program, loop.decode_program, loop.finish_program)


def few_and_many(few: int, many: int):
    """Numbers of calls: few by default, many among the slow tests."""
    return pytest.mark.parametrize("calls", [few, pytest.param(many, marks=pytest.mark.slow)])


def prompt(seed: int, longest: int = 12) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, 50, (2, rng.integers(1, longest + 1)))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.ci
@few_and_many(10, 200)
def test_two_threads_with_their_own_settings_get_the_results_of_each_alone(calls):
    model = tiny.make("llama", seed=1)
    settings = (
        {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 6},
        {"num_beams": 3, "repetition_penalty": 1.3, "max_new_tokens": 5},
    )

    def results(fields):
        return [jaxllm.generate(model, prompt(i), key=i, **fields).sequences for i in range(calls)]

    with ThreadPoolExecutor(len(settings)) as threads:  # first, so that they compile together, too
        together = list(threads.map(results, settings))
    for actual, fields in zip(together, settings, strict=True):
        for one, single in zip(actual, results(fields), strict=True):
            np.testing.assert_array_equal(one, single)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("calls", "longest_prompt", "most_new"),
    [(30, 20, 8), pytest.param(500, 40, 24, marks=pytest.mark.slow)],
)
def test_random_lengths_compile_one_program_for_each_pair_of_buckets(
    calls, longest_prompt, most_new
):
    model = tiny.make("llama")
    jax.clear_caches()
    before = [program_count(program) for program in PROGRAMS]
    rng, pairs, decoded = np.random.default_rng(0), set(), set()
    for i in range(calls):
        ids, new = prompt(i, longest_prompt), int(rng.integers(1, most_new + 1))
        jaxllm.generate(model, ids, max_new_tokens=new, eos_token_id=None)
        columns = 1 if ids.shape[1] == 1 else next(n for n in (16, 32, 64) if ids.shape[1] <= n)
        pairs.add((columns, 16 if new <= 16 else 32))
        decoded |= {columns + (16 if new <= 16 else 32)} if new > 1 else set()
    prefills, decodes, finishes = (
        program_count(program) - n for program, n in zip(PROGRAMS, before, strict=True)
    )
    assert len(pairs) > 1
    # Decoding sees the columns of prompt and new tokens together: 16 + 32 as 32 + 16.
    sizes = {columns + new for columns, new in pairs}
    assert (prefills, decodes, finishes) == (len(pairs), len(decoded), len(sizes))


@pytest.mark.ci
@few_and_many(30, 500)
def test_repeated_calls_leave_nothing_behind(calls):
    model, ids = tiny.cached("llama"), prompt(0)

    def call(i):
        jaxllm.generate(model, ids, max_new_tokens=4, do_sample=True, key=i, temperature=1 + i / 99)
        jaxllm.generate(  # a rule of its own at each call
            model, ids, max_new_tokens=4, prefix_allowed_tokens_fn=lambda row, ids: [3 + i % 5, 9]
        )
        for _ in jaxllm.stream(model, ids, max_new_tokens=4):
            pass

    def resources():
        gc.collect()
        return {
            "arrays": len(jax.live_arrays()),
            "threads": threading.active_count(),
            "tasks": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
        }

    for i in range(5):
        call(i)
    before, objects = resources(), len(gc.get_objects())
    memory = resident_bytes()
    for i in range(calls):
        call(i)
    assert resident_bytes() - memory < 2**24
    after = resources()
    assert all(after[name] <= before[name] for name in before), (before, after)
    assert len(gc.get_objects()) - objects < calls  # less than one object for three calls


def test_a_call_flattens_the_model_once_and_decodes_only_what_is_left():
    model, flattened = tiny.make("llama", seed=2), []
    ids, fields = tiny.ids(7, 3), {"eos_token_id": None}  # no other test has seven rows

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_name == "_pytree__flatten":
            flattened.append(any(x is model for x in frame.f_locals.values()))

    for new in (1, 3):
        before = program_count(loop.decode_program)
        jaxllm.generate(model, ids, max_new_tokens=new, **fields)
        assert (program_count(loop.decode_program) > before) == (new > 1)
        sys.setprofile(note)
        first = jaxllm.generate(model, ids, max_new_tokens=new, **fields).sequences
        sys.setprofile(None)
        assert sum(flattened) == 1
        flattened.clear()
    # What is assigned to the model is seen by the next call.
    table = model.backbone.embed.weight
    table[...] = table[...][:, ::-1]
    assert not np.array_equal(
        first, jaxllm.generate(model, ids, max_new_tokens=3, **fields).sequences
    )
