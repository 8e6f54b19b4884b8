"""Every row once, and equal to the row alone, whatever runs beside it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny
from batch_tools import differences, uneven_rows

from jaxllm import BatchGenerator
from jaxllm.batch import slots
from jaxllm.nn.platform import decoding

SMALL = {
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "bloom": {"n_layer": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
}


@functools.cache
def model(family: str) -> Any:
    return tiny.make(family, **SMALL[family])


def check(net: Any, rows: list[dict[str, Any]], slots: int, **fields: Any) -> BatchGenerator:
    engine = BatchGenerator(net, slots=slots, seed=7, **fields)
    outputs = engine.generate(rows)
    assert [output.id for output in outputs] == [row["id"] for row in rows]
    wrong, _ = differences(net, rows, outputs, seed=7, **fields)
    assert wrong == []
    return engine


# The rows of all tests have one bucket of prompts and one of lengths, so that they share programs.
def test_greedy_rows_equal_rows_alone():
    rows = [{**row, "eos_token_id": [2, 10, 11]} for row in uneven_rows(40, prompts=16, new=16)]
    engine = check(model("llama"), rows, slots=4)
    assert engine.counts.rows == 40
    assert engine.counts.finish_reasons.keys() == {"eos", "length"}


def test_rows_with_four_steps_between_checks_equal_rows_alone(monkeypatch):
    """As on a GPU; rows end, and slots become free, between two checks."""
    monkeypatch.setattr(slots, "steps_between_checks", lambda platform: 4)
    engine = check(model("llama"), uneven_rows(16, prompts=16, new=16, seed=3), slots=4)
    assert engine.counts.decode_steps % 4 == 0


def test_the_last_rows_of_a_batch_leave_rows_that_run_alone():
    """Two prompts start at once. The last one comes alone, while all others run."""
    rows = [
        {"id": i, "input_ids": [5, 6, 7 + i], "max_new_tokens": 10, "eos_token_id": None}
        for i in range(17)
    ]
    engine = check(model("llama"), rows, slots=32)
    assert engine.counts.program_calls["first tokens of 2 into 32 x 16"] == 9


@pytest.mark.parametrize("family", ["llama", pytest.param("bloom", marks=pytest.mark.ci)])
def test_prompts_that_are_read_in_chunks_side_by_side_equal_rows_alone(family, monkeypatch):
    """Two prompts are read at once, in chunks of 32 and 16 columns; one that is complete waits for
    the other."""
    monkeypatch.setitem(decoding.CHUNK_SIZE, "cpu", 32)
    monkeypatch.setitem(decoding.NARROW_CHUNK_SIZE, "cpu", 16)
    rows = [
        {"id": i, "input_ids": [3 + (7 * i + j) % 40 for j in range(length)], "max_new_tokens": 6}
        for i, length in enumerate([64, 33, 50, 17, 16, 1, 40, 63, 20, 31, 49, 2, 35] * 3)
    ]
    calls = check(model(family), rows, slots=32).counts.program_calls
    assert calls["prefill 1 x 32 of 2 x 128"] > 39
    assert calls["prefill 2 x 16 of 2 x 128"] < 15  # narrow chunks, some of them side by side
    assert not any("into" in name for name in calls if name.startswith("prefill"))


@pytest.mark.parametrize(
    "family", [*(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "bloom")), "t5"]
)
def test_sampled_rows_equal_rows_alone(family):
    """With numbers of their own, and keys from the job's seed or their own."""
    rows = uneven_rows(12, prompts=16, new=16, seed=1)
    for i, row in enumerate(rows):
        row |= {"temperature": 0.5 + 0.1 * (i % 7), "top_k": 5 * (i % 4), "top_p": 0.8 + i / 80}
        row |= {"repetition_penalty": 1.0 + 0.1 * (i % 3), "min_new_tokens": i % 5}
        if i % 2:
            row["seed"] = 1000 + i
    rows = [{**row, "max_new_tokens": 8} for row in rows]
    check(model(family), rows, slots=4, do_sample=True)


@pytest.mark.by_default("greedy")
@pytest.mark.parametrize(
    "fields", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sampled", "beams"]
)
def test_processors_without_parameters(fields):
    """Beside rows without them, which run in another group."""
    rows = uneven_rows(6, prompts=16, new=16, seed=2)
    for row in rows:
        row["max_new_tokens"] = 16
    for row in rows[::2]:
        row |= {"renormalize_logits": True, "remove_invalid_values": True}
    check(model("llama"), rows, slots=4, **fields)
