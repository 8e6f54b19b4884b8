"""A few random rows of the batch engine: each as the row alone, and what `difference` finds."""

from __future__ import annotations

import dataclasses

import batch_engine
import pytest
from batch_rows import draw_rows

from jaxllm import BatchGenerator
from jaxllm.tokenizers.byte_level import byte_tokenizer

MODEL = batch_engine.small_model("llama")


@pytest.mark.ci
def test_random_rows_equal_rows_alone():
    """Prompts of one bucket and one sequence each, so that few programs compile."""
    rows = [
        row
        for row in draw_rows(3, {"sampling": 40, "errors": 4})
        if len(row["input_ids"]) <= 16 and row.get("num_return_sequences") == 1
    ]
    wanted = [batch_engine.row_alone(MODEL, row, index) for index, row in enumerate(rows)]
    engine = BatchGenerator(MODEL, byte_tokenizer(), slots=4, seed=batch_engine.JOB_SEED)
    outputs = engine.generate(rows)
    found = [
        batch_engine.difference(MODEL, *three) for three in zip(rows, outputs, wanted, strict=True)
    ]
    assert not any(found), found
    assert len(rows) > 10
    row, output, expected = next(
        three
        for three in zip(rows, outputs, wanted, strict=True)
        if three[1].error is None and len(three[1].output_ids[0]) > 1
    )
    other = [[ids[0] ^ 1, *ids[1:]] for ids in output.output_ids]
    changed = (
        dataclasses.replace(output, output_ids=tuple(other)),
        dataclasses.replace(output, output_ids=tuple(ids[:-1] for ids in output.output_ids)),
        dataclasses.replace(output, finish_reasons=("stop",) * len(output.output_ids)),
        dataclasses.replace(output, error="wrong", error_kind="InputError"),
    )
    for wrong in changed:
        assert batch_engine.difference(MODEL, row, wrong, expected)


def test_rows_are_drawn_by_their_seed():
    assert draw_rows(5) == draw_rows(5) != draw_rows(6)
