"""Programs and decoding steps, counted."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tiny
from batch_tools import uneven_rows

from jaxllm import BatchGenerator
from jaxllm.common.compiling import CompileClock

SLOTS = 64


def lengths(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    drawn = {
        "geometric": lambda: rng.geometric(1 / 24, count),
        "lognormal": lambda: np.exp(rng.normal(2.5, 1.0, count)).astype(int) + 1,
        "a tenth long": lambda: np.where(rng.random(count) < 0.1, 240, rng.integers(4, 16, count)),
    }[name]()
    return np.minimum(drawn, 240)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["geometric", "lognormal", "a tenth long"])
def test_decoding_steps_are_near_the_ideal(name):
    rng = np.random.default_rng(0)
    model = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=256)
    new = lengths(name, 1003, rng)
    rows = [{"input_ids": [5, 6, 7], "max_new_tokens": int(n)} for n in new]
    engine = BatchGenerator(model, slots=SLOTS, eos_token_id=None)
    outputs = engine.generate(rows)
    assert [len(output.output_ids[0]) for output in outputs] == new.tolist()
    # The first token of a row comes with its prompt.
    ideal = -(-int((new - 1).sum()) // SLOTS)
    counts = engine.counts
    assert counts.busy_slot_steps == (new - 1).sum()
    assert ideal <= counts.decode_steps <= 1.10 * ideal
    assert counts.utilisation > 0.9


@pytest.mark.ci
def test_programs_do_not_depend_on_lengths_and_are_none_the_second_time():
    model = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=256)
    engine = BatchGenerator(model, slots=8, do_sample=True)
    with contextlib.closing(CompileClock()) as clock:
        engine.generate(uneven_rows(50, prompts=100, new=40))
        # Chunks of 32 and 128 columns, first tokens, and decode steps.
        assert clock.programs == len(engine.counts.program_calls) == 4
        rows = uneven_rows(40, prompts=100, new=40, seed=1)
        for i, row in enumerate(rows):
            row |= {"temperature": 0.5 + i / 40, "top_k": i, "eos_token_id": [i + 3], "seed": i}
        BatchGenerator(model, slots=8, do_sample=True, top_p=0.8).generate(rows)
        assert clock.programs == 4
