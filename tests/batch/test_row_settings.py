"""Rows of different settings side by side in one group."""

from __future__ import annotations

import pytest
import tiny
from batch_tools import differences, uneven_rows

from jaxllm import BatchGenerator

MODEL = tiny.make("llama", num_hidden_layers=1)


@pytest.mark.ci
def test_greedy_and_sampled_rows_side_by_side():
    rows = uneven_rows(12, prompts=16, new=16, seed=2)
    for i, row in enumerate(rows):
        row |= {"do_sample": bool(i % 2), "max_new_tokens": 12}
        if i % 2:
            row |= {"temperature": 0.7, "min_p": 0.05}
    engine = BatchGenerator(MODEL, slots=4, seed=7)
    assert differences(MODEL, rows, engine.generate(rows), seed=7)[0] == []
    assert len(engine.counts.program_calls) == 3  # one group: chunks, first tokens, and its slots


@pytest.mark.ci
def test_total_lengths_of_a_row_override_new_tokens_of_the_job(recwarn):
    """Within a call the numbers of new tokens take precedence, as in transformers."""
    prompt = {"input_ids": [5, 6, 7], "eos_token_id": None}
    rows = [
        prompt,
        {**prompt, "max_length": 8},
        {**prompt, "max_length": 8, "max_new_tokens": 2},
        {**prompt, "max_length": None},
    ]
    outputs = BatchGenerator(MODEL, max_new_tokens=12).generate(rows)
    assert [len(output.output_ids[0]) for output in outputs] == [12, 5, 2, 12]
    likely_end = {"eos_token_id": 2, "logit_bias": {2: 100.0}}
    row = {"input_ids": [5, 6, 7], "min_length": 8, "max_new_tokens": 12, **likely_end}
    (output,) = BatchGenerator(MODEL, min_new_tokens=1).generate([row])
    assert len(output.output_ids[0]) == 6
    assert sum("no effect" in str(warning.message) for warning in recwarn) == 1  # the third row


def test_samples_of_a_row_differ_and_repeat_by_its_seed():
    row = {"input_ids": [5, 6, 7], "max_new_tokens": 6, "num_return_sequences": 3, "seed": 1}
    first, second, other = (
        output.output_ids
        for output in BatchGenerator(MODEL, slots=3, do_sample=True, eos_token_id=None).generate(
            [row, row, {**row, "seed": 2}]
        )
    )
    assert len(set(map(tuple, first))) == 3
    assert first == second
    assert not set(map(tuple, first)) & set(map(tuple, other))


@pytest.mark.slow
def test_several_samples_a_row():
    rows = uneven_rows(4, prompts=16, new=16, seed=3)
    rows = [{**row, "max_new_tokens": 10, "num_return_sequences": 3} for row in rows]
    engine = BatchGenerator(MODEL, slots=4, seed=7, do_sample=True)
    outputs = engine.generate(rows)
    assert all(len(output.output_ids) == len(output.finish_reasons) == 3 for output in outputs)
    assert differences(MODEL, rows, outputs, seed=7, do_sample=True)[0] == []
    assert len({tuple(ids) for ids in outputs[0].output_ids}) > 1
    assert outputs[0].to_dict()["output_ids"] == list(outputs[0].output_ids)


@pytest.mark.ci
def test_result_does_not_depend_on_slots_or_neighbours():
    rows = uneven_rows(40, prompts=16, new=16, seed=4)
    results = [
        {
            output.id: output.output_ids
            for output in BatchGenerator(MODEL, slots=slots, seed=3).generate(part)
        }
        for slots, part in ((2, rows), (16, rows), (4, rows[::-1]))
    ]
    assert results[0] == results[1] == results[2]
