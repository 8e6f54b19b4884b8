"""Every row once, and equal to the row alone, whatever runs beside it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tiny
from batch_tools import alone, differences, new_tokens, uneven_rows
from conformance_runs import DATA

import jaxllm
from jaxllm import BatchGenerator

LONG = {"llama": {"max_position_embeddings": 256}, "gpt2": {"n_positions": 256}, "t5": {}}


@functools.cache
def model(family: str) -> Any:
    return tiny.make(family, **LONG[family])


def check(family: str, rows: list[dict[str, Any]], slots: int, **fields: Any) -> BatchGenerator:
    engine = BatchGenerator(model(family), slots=slots, seed=7, **fields)
    outputs = engine.generate(rows)
    assert [output.id for output in outputs] == [row["id"] for row in rows]
    wrong, _ = differences(model(family), rows, outputs, seed=7, **fields)
    assert wrong == []
    return engine


def test_greedy_rows_equal_rows_alone():
    engine = check("llama", uneven_rows(100), slots=8)
    assert engine.counts.rows == 100
    assert engine.counts.reasons.keys() == {"eos", "length"}


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_sampled_rows_equal_rows_alone(family):
    """With numbers of their own, and keys from the job's seed or their own."""
    rows = uneven_rows(24, prompts=16, new=16, seed=1)
    for i, row in enumerate(rows):
        row |= {"temperature": 0.5 + 0.1 * (i % 7), "top_k": 5 * (i % 4), "top_p": 0.8 + i / 120}
        row |= {"repetition_penalty": 1.0 + 0.1 * (i % 3), "min_new_tokens": i % 5}
        if i % 2:
            row["seed"] = 1000 + i
    check(family, [{**row, "max_new_tokens": 8} for row in rows], slots=4, do_sample=True)


def test_greedy_and_sampled_rows_side_by_side():
    rows = uneven_rows(24, prompts=16, new=16, seed=2)
    for i, row in enumerate(rows):
        row |= {"do_sample": bool(i % 2), "max_new_tokens": 12}
        if i % 2:
            row |= {"temperature": 0.7, "min_p": 0.05}
    engine = check("llama", rows, slots=4)
    assert len({name.split(", ")[-1] for name in engine.counts.buckets}) == len(
        engine.counts.buckets
    )  # one group


def test_several_samples_a_row():
    rows = uneven_rows(6, prompts=16, new=16, seed=3)
    rows = [{**row, "max_new_tokens": 10, "num_return_sequences": 3} for row in rows]
    engine = BatchGenerator(model("llama"), slots=4, seed=7, do_sample=True)
    outputs = engine.generate(rows)
    assert all(len(output.output_ids) == len(output.finish_reasons) == 3 for output in outputs)
    assert differences(model("llama"), rows, outputs, seed=7, do_sample=True) == ([], 0)
    assert len({tuple(ids) for ids in outputs[0].output_ids}) > 1
    assert outputs[0].to_dict()["output_ids"] == list(outputs[0].output_ids)


def test_result_does_not_depend_on_slots_or_neighbours():
    rows = uneven_rows(40, seed=4)
    results = [
        {
            output.id: output.output_ids
            for output in BatchGenerator(model("llama"), slots=slots, seed=3).generate(part)
        }
        for slots, part in ((2, rows), (16, rows), (4, rows[::-1]))
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["s_llama_dynamic", "s_llama_longrope"])
def test_rope_that_depends_on_the_length_sees_its_own_row(name):
    net = jaxllm.load(DATA / "models" / name)[0]
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": rng.integers(3, 90, n).tolist(), "max_new_tokens": 8, "eos_token_id": None}
        for n in (5, 60, 9, 40)
    ]
    outputs = BatchGenerator(net, slots=4).generate(rows)
    for index, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        sequence = alone(net, row, index).sequences[0]
        assert output.output_ids[0] == new_tokens(net, row, sequence, ())


def test_rows_of_other_programs_form_groups():
    rows = [{"input_ids": [5, 6, 7, 8 + i], "max_new_tokens": 6} for i in range(8)]
    rows[1]["suppress_tokens"] = [9, 10]
    rows[4]["suppress_tokens"] = [11]
    rows[6]["exponential_decay_length_penalty"] = (2, 1.5)
    outputs = BatchGenerator(model("llama"), slots=2).generate(rows)
    assert differences(model("llama"), rows, outputs) == ([], 0)


def test_stop_strings_of_each_row():
    net, tokenizer = jaxllm.load(DATA / "models" / "s_llama_tok")
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 90, 6).tolist() for _ in range(6)]
    free = BatchGenerator(net, tokenizer, max_new_tokens=12, eos_token_id=None).generate(ids)
    rows = []
    for prompt, output in zip(ids, free, strict=True):
        piece = tokenizer.decode(output.output_ids[0][3:5])[-2:]
        rows.append({"input_ids": prompt, "stop_strings": [piece]})
    rows[0].pop("stop_strings")
    engine = BatchGenerator(net, tokenizer, slots=4, max_new_tokens=12, eos_token_id=None)
    outputs = engine.generate(rows)
    for row, output in zip(rows, outputs, strict=True):
        own = {"stop_strings": row["stop_strings"]} if "stop_strings" in row else {}
        want = jaxllm.generate(
            net,
            [row["input_ids"]],
            max_new_tokens=12,
            eos_token_id=None,
            tokenizer=tokenizer,
            **own,
        ).sequences[0]
        assert output.output_ids[0] == np.asarray(want)[6:].tolist()
    assert {output.finish_reasons[0] for output in outputs[1:]} == {"stop"}
    assert outputs[0].finish_reasons == ("length",)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("sampled", [False, True])
def test_1003_rows(family, sampled):
    rows = uneven_rows(1003, seed=5)
    fields = {"do_sample": True, "temperature": 0.8} if sampled else {}
    check(family, rows, slots=32, **fields)
