"""Predicted bytes, slots that fit, and what happens when memory runs out after all."""

from __future__ import annotations

import re

import jax
import pytest
import tiny
from batch_tools import uneven_rows
from compiling import compiled_as_users

from jaxllm import BatchGenerator
from jaxllm.batch import memory as memory_module
from jaxllm.batch import slot_pool as pools
from jaxllm.batch.memory import Prediction, SlotLimits, memory_budget
from jaxllm.batch.row_groups import groups, sizes_of
from jaxllm.batch.rows import RawRow, RowReader
from jaxllm.common.errors import InputError
from jaxllm.common.hardware import nbytes

MODEL = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=4096)
ROWS = [{"input_ids": [5, 6, 7], "max_new_tokens": 20 + i} for i in range(12)]


def test_budget():
    assert memory_budget("1.5GB") == memory_budget(" 1.5 g") == memory_budget(1_500_000_000)
    assert memory_budget("20MiB") == 20_000_000
    assert memory_budget(None) > 10**8
    for wrong in ("much", 0, -1, "0", 1.5):
        with pytest.raises(InputError, match="memory"):
            memory_budget(wrong)


@pytest.mark.ci
def test_prediction_is_what_the_slots_take():
    engine = BatchGenerator(MODEL, slots=8)
    engine.generate(ROWS)
    (actual,) = engine.memory
    assert actual.weights == nbytes(MODEL)
    layer = 2 * actual.slots * actual.capacity * 2 * 8 * 4  # keys and values of 2 heads of 8
    assert layer < actual.cache < 1.5 * layer
    assert actual.fits
    assert str(actual.slots) in str(actual)


@pytest.mark.ci
def test_the_room_for_rows_of_the_jobs_own_lengths():
    """As many of the longest rows as slots fill the budget, and more of shorter ones."""
    engine = BatchGenerator(MODEL, slots=8)
    rows = [*ROWS, {"input_ids": [5, 6, 7], "max_new_tokens": 400}]
    raw = [RawRow(i, i, row) for i, row in enumerate(rows)]
    (memory,) = engine.plan(raw).memory
    mean, ninth, longest = memory.lengths
    assert (mean, ninth, longest) == (57, 34, 403)
    whole = BatchGenerator(MODEL, slots=8, memory=memory.total)
    (filled,) = whole.plan(raw).memory
    assert filled.slots == filled.rows_at_once(longest) == 8
    assert (filled.rows_at_once(mean), filled.rows_at_once(ninth)) == (64, 64)
    assert filled.room.startswith("memory has room for about 64 of 57 tokens (the mean of the rows")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "name", "width"),
    [("t5", "prefill_slots", 64), ("t5", "prefill_slots", 512), ("llama", "prefill_chunk", 512)],
)
def test_activations_are_near_what_the_compiler_allocates(family, name, width, monkeypatch):
    compiled = []
    program = getattr(pools, name)

    def spy(*arguments, **options):
        lowered = program.lower(*arguments, **options)
        compiled.append(compiled_as_users(lowered).memory_analysis().temp_size_in_bytes)
        return program(*arguments, **options)

    monkeypatch.setattr(pools, name, spy)
    engine = BatchGenerator(MODEL if family == "llama" else tiny.make(family), slots=2)
    engine.generate([{"input_ids": [5] * width, "max_new_tokens": 3}])
    assert 0.5 * compiled[0] < engine.memory[0].activations < 4 * compiled[0]


@pytest.mark.slow
def test_fewer_slots_where_memory_is_short():
    full = BatchGenerator(MODEL, slots=8)
    expected = full.generate(ROWS)
    (actual,) = full.memory
    half = actual.weights + (actual.cache + actual.activations) // 2
    engine = BatchGenerator(MODEL, slots=8, memory=half)
    assert engine.generate(ROWS) == expected
    assert 1 < engine.memory[0].slots <= 4


@pytest.mark.ci
def test_long_rows_have_a_pool_of_their_own():
    """Not all rows pay for one that needs a large slot."""
    rows = [*ROWS, {"input_ids": [5] * 100, "max_new_tokens": 3900}]
    rows[-1]["eos_token_id"] = list(range(50))  # it ends at once
    small = BatchGenerator(MODEL, slots=8)
    small.generate(ROWS)
    engine = BatchGenerator(MODEL, slots=8, memory=small.memory[0].total + 3 * 10**6)
    outputs = engine.generate(rows)
    assert all(output.error is None for output in outputs)
    assert [actual.capacity for actual in engine.memory] == [4096, 64]
    assert engine.memory[0].slots == 1
    assert engine.memory[1].slots == 8


def test_rows_of_one_capacity_and_other_columns_have_pools_of_their_own(monkeypatch):
    """With five beams 64 + 4 * 64 = 256 + 4 * 16. Every row has a pool, or would wait for ever."""

    def predict(model, group, budget, mesh, tasks, sizes, slots, **options):
        return Prediction(0, slots, 0, 2, slots=slots, capacity=sizes.capacity)

    monkeypatch.setattr(memory_module, "predict", predict)
    reader = RowReader(MODEL, None, {"num_beams": 5}, 0)
    lengths = [(10, 50), (240, 10)]
    rows = [
        reader.read(RawRow(i, i, {"input_ids": [5] * prompt, "max_new_tokens": new}))
        for i, (prompt, new) in enumerate(lengths)
    ]
    (group,) = groups(rows, 50)
    pools = list(memory_module.pools(MODEL, group, SlotLimits(8, 8), 2, None, more=True))
    for row in rows:
        own = sizes_of(row, False, 1)
        assert own.capacity == 320
        assert any(pool.holds(row, own) for pool in pools)


def test_a_prompt_beyond_the_context_is_an_error():
    """It would cost memory and time in all slots, for a meaningless answer."""
    reader = RowReader(MODEL, None, {}, 0)
    limit = MODEL.config.context_length
    assert reader.read(RawRow(0, 0, {"input_ids": [5] * limit, "max_new_tokens": 1}))
    with pytest.raises(
        InputError, match=f"{limit + 1} tokens, but the model's context has {limit}"
    ):
        reader.read(RawRow(0, 0, {"input_ids": [5] * (limit + 1), "max_new_tokens": 1}))


@pytest.mark.ci
def test_a_row_that_never_fits_says_which_number_to_change():
    rows = [*ROWS, {"input_ids": [5, 6, 7], "max_new_tokens": 3900}]
    small = BatchGenerator(MODEL, slots=1)
    small.generate(ROWS)
    memory = small.memory[0].total + 3 * 10**5
    outputs = BatchGenerator(MODEL, slots=8, memory=memory).generate(rows)
    assert [output.error is None for output in outputs] == [True] * 12 + [False]
    assert outputs[-1].error.startswith("max_new_tokens: ")
    most = int(outputs[-1].error.split("at most ")[1].split(",")[0])
    rows[-1]["max_new_tokens"] = most
    assert BatchGenerator(MODEL, slots=8, memory=memory).generate(rows)[-1].error is None
    for memory, why in ((-1, "the weights alone"), (1, "shorten the prompt")):
        tight = BatchGenerator(MODEL, slots=8, memory=nbytes(MODEL) + memory).generate(ROWS)
        assert all(why in output.error for output in tight)


def test_a_prediction_is_that_of_the_widest_prompt():
    """In any order of the rows, and though a row with a short prompt needs a slot as large."""
    short = {"input_ids": [5, 6, 7], "max_new_tokens": 500}
    wide = {"input_ids": [5] * 400, "max_new_tokens": 100}
    plans = [
        BatchGenerator(MODEL, slots=2).plan(RawRow(i, i, row) for i, row in enumerate(rows)).memory
        for rows in ([wide, wide], [short, wide], [wide, short])
    ]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.by_default("4")
@pytest.mark.parametrize("slots", [4, 8])
def test_slots_are_halved_when_memory_runs_out(slots, monkeypatch):
    """A device that has less than it says, at any call. No row is lost, and none runs twice."""
    rows = uneven_rows(16, prompts=16, new=16)
    expected = BatchGenerator(MODEL, slots=2).generate(rows)
    program, calls = pools.decode_slots, []

    def refuse(model, slots, *arguments, **options):
        calls.append(slots.count)
        if slots.count > 2 and calls.count(slots.count) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return program(model, slots, *arguments, **options)

    # The prediction traces the program under its other name.
    monkeypatch.setattr(pools, "decode_slots", refuse)
    engine = BatchGenerator(MODEL, slots=slots)
    assert engine.generate(rows) == expected
    assert set(calls) == {n for n in (8, 4, 2) if n <= slots}
    assert engine.counts.halvings == len(set(calls)) - 1


def test_rows_are_not_lost_when_memory_runs_out_while_their_prompts_are_read(monkeypatch):
    rows = uneven_rows(12, prompts=16, new=16)
    expected = BatchGenerator(MODEL, slots=2).generate(rows)
    program, calls = pools.prefill_chunk, []

    def refuse(*arguments):
        calls.append(1)
        if len(calls) == 7:  # while the slots decode
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return program(*arguments)

    monkeypatch.setattr(pools, "prefill_chunk", refuse)
    engine = BatchGenerator(MODEL, slots=4)
    assert engine.generate(rows) == expected
    assert engine.counts.halvings == 1


@pytest.mark.ci
def test_other_failures_of_the_device_are_not_hidden(monkeypatch):
    def fail(*arguments, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(pools, "decode_slots", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        BatchGenerator(MODEL, slots=8).generate(ROWS)


def test_a_row_that_does_not_fit_leaves_the_others_with_one_slot():
    rows = [*ROWS[:2], {"input_ids": [5, 6, 7], "max_new_tokens": 3900}]
    small = BatchGenerator(MODEL, slots=1)
    expected = small.generate(rows[:2])
    memory = small.memory[0].total + 3 * 10**5
    outputs = BatchGenerator(MODEL, slots=1, memory=memory).generate(rows)
    assert outputs[:2] == expected
    assert outputs[2].error.startswith("max_new_tokens: one slot of 4096 columns")


@pytest.mark.ci
def test_out_of_memory_with_one_slot_is_the_rows_error(monkeypatch):
    def fail(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    monkeypatch.setattr(pools, "decode_slots", fail)
    outputs = BatchGenerator(MODEL, slots=2).generate(ROWS[:3])
    assert all("ran out of memory with a single slot" in output.error for output in outputs)


def test_a_refused_row_is_told_what_chunks_need():
    """Its prompt needs more memory as a whole than beside the slot in chunks."""
    model = tiny.make("llama", max_position_embeddings=4096)
    row = {"input_ids": [5] * 1000, "max_new_tokens": 3000}
    (output,) = BatchGenerator(model, slots=1, memory=11_000_000).generate([row])
    found = re.search(r"ask for at most (\d+), or raise memory", output.error)
    assert found is not None, output.error
    assert found[1] == "1048"
    fewer = row | {"max_new_tokens": int(found[1]), "eos_token_id": list(range(50))}
    (output,) = BatchGenerator(model, slots=1, memory=11_000_000).generate([fewer])
    assert output.error is None
