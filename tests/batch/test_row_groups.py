"""Rows that one program cannot serve, stop strings, and RoPE that looks at lengths."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from batch_tools import alone, differences, new_tokens
from conformance_runs import DATA

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch.row_groups import PER_ROW_FIELDS, groups
from jaxllm.batch.rows import RawRow, RowReader

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


PER_ROW = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram_size": 2,
    "logit_bias": {7: 1.0},
    "min_new_tokens": 2,
}


def test_rows_of_one_program_may_differ_in_per_row_fields():
    assert PER_ROW.keys() == PER_ROW_FIELDS
    reader = RowReader(MODEL, None, {"max_new_tokens": 4, "do_sample": True}, seed=0)
    for name, value in {**PER_ROW, "bad_words_ids": [[7]]}.items():
        rows = [{"input_ids": [3, 4], **fields} for fields in ({name: value}, {}, {name: None})]
        read = [reader.read(RawRow(i, i, row)) for i, row in enumerate(rows)]
        found = list(groups(read, MODEL.config.vocab_size))
        if name in PER_ROW:
            assert [name in group.shared_fields for group in found] == [True], name
        else:
            assert [len(group.rows) for group in found] == [1, 2], name


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
