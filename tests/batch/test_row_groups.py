"""Rows that one program cannot serve, stop strings, and RoPE that looks at lengths."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from batch_tools import alone, differences, new_tokens
from conformance_runs import DATA

import jaxllm
from jaxllm import BatchGenerator

MODEL = tiny.make("llama", num_hidden_layers=1)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["s_llama_dynamic", "s_llama_longrope"])
def test_rope_that_depends_on_the_length_sees_its_own_row(name):
    net = jaxllm.load(DATA / "models" / name)[0]
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": rng.integers(3, 90, n).tolist(), "max_new_tokens": 8, "eos_token_id": None}
        for n in (40, 60)
    ]
    outputs = BatchGenerator(net, slots=4).generate(rows)
    for index, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        sequence = alone(net, row, index).sequences[0]
        assert output.output_ids[0] == new_tokens(net, row, sequence, ())


@pytest.mark.ci
def test_rows_of_other_programs_form_groups():
    rows = [{"input_ids": [5, 6, 7, 8 + i], "max_new_tokens": 6} for i in range(8)]
    rows[1]["suppress_tokens"] = [9, 10]
    rows[4]["suppress_tokens"] = [11]
    outputs = BatchGenerator(MODEL, slots=2).generate(rows)
    assert differences(MODEL, rows, outputs)[0] == []


@pytest.mark.ci
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
        expected = jaxllm.generate(
            net,
            [row["input_ids"]],
            max_new_tokens=12,
            eos_token_id=None,
            tokenizer=tokenizer,
            **own,
        ).sequences[0]
        assert output.output_ids[0] == np.asarray(expected)[6:].tolist()
    assert {output.finish_reasons[0] for output in outputs[1:]} == {"stop"}
    assert outputs[0].finish_reasons == ("length",)
