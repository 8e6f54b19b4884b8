"""Beams in slots: a group of beams is one slot, and equal to the row alone."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from typing import Any

import numpy as np
import pytest
import tiny
from batch_tools import alone, differences, uneven_rows
from compiling import compiled_as_users
from conformance_runs import DATA
from generation_tools import sorted_sizes

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch import slot_pool as pools
from jaxllm.common.compiling import CompileClock
from jaxllm.common.hardware import nbytes

SMALL = {
    "llama": {"num_hidden_layers": 1},
    "gpt2": {"n_layer": 1},
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
}
LONG = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=4096)


@functools.cache
def model(family: str) -> Any:
    return tiny.make(family, **SMALL[family])


def beam_rows(count: int, seed: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """Rows of uneven lengths with numbers of their own."""
    rows = uneven_rows(count, prompts=16, new=16, seed=seed)
    for i, row in enumerate(rows):
        row["max_new_tokens"] = max(row["max_new_tokens"], 2)
        row |= {"length_penalty": (1.0, 2.0, -1.0, 0.0)[i % 4], "min_new_tokens": i % 3}
        row |= {"num_return_sequences": 2, "repetition_penalty": 1.0 + 0.2 * (i % 2)}
        if i % 2 == 0:
            row["eos_token_id"] = [2, *range(10 + i, 16 + i)]
    return [{**row, **fields} for row in rows]


def check(family: str, rows: list[dict[str, Any]], slots: int, **fields: Any) -> BatchGenerator:
    engine = BatchGenerator(model(family), slots=slots, seed=7, **fields)
    outputs = engine.generate(rows)
    assert [len(output.output_ids) for output in outputs] == [
        row.get("num_return_sequences", 1) for row in rows
    ]
    assert differences(model(family), rows, outputs, seed=7, **fields)[0] == []
    return engine


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("t5"))
def test_rows_equal_rows_alone(family):
    """With lengths, end tokens, penalties and numbers of results of their own, in few slots."""
    rows = beam_rows(12, num_beams=3)
    counts = check(family, rows, slots=3).counts
    reading, decoding = sorted(counts.program_calls, reverse=True)
    assert reading.startswith("prefill 1 x 16 into 3 x ")
    assert decoding.startswith("decode 3 x ")
    assert decoding.endswith(" of 3 beams")
    assert counts.program_calls[reading] == 12  # a prompt is read once, whatever its row returns
    assert counts.decode_steps * 3 == counts.slot_steps
    assert counts.decode_steps < sum(row["max_new_tokens"] - 1 for row in rows) / 2
    assert counts.finish_reasons.total() == 24


def test_beams_go_on_while_a_better_one_may_come():
    """With `early_stopping="never"`. The first beams that end are not the best of these rows."""
    prompts = [[42, 32, 27, 15, 17], [33, 45, 26, 31, 48], [38, 21, 24, 49, 40]]
    fields = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"}
    fields |= {"max_new_tokens": 11, "eos_token_id": [2, *range(10, 18)]}
    rows = [{"input_ids": ids, **fields} for ids in prompts]
    outputs = BatchGenerator(model("llama"), slots=2).generate(rows)
    assert [output.finish_reasons for output in outputs] == [("length",)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [True, "never"])
def test_other_rules_of_ending(early_stopping):
    rows = beam_rows(8, seed=1)
    for row in rows[::2]:
        row["early_stopping"] = early_stopping
    engine = check("llama", rows, slots=2, num_beams=3)
    assert len(engine.counts.program_calls) == 4  # each rule has programs of its own


@pytest.mark.slow
def test_sampled_beams_have_the_rows_keys():
    rows = beam_rows(6, seed=2)
    for i, row in enumerate(rows):
        row |= {"temperature": 0.8 + 0.3 * i, "top_k": 7 * (i % 3), "top_p": 1.0 - 0.05 * i}
        if i % 2:
            row["seed"] = 99 + i
    check("llama", rows, slots=2, num_beams=3, do_sample=True)


@pytest.mark.ci
def test_results_do_not_depend_on_slots_or_neighbours():
    rows = beam_rows(10, seed=3, num_beams=3)
    results = [
        {
            output.id: (output.output_ids, output.finish_reasons)
            for output in BatchGenerator(model("llama"), slots=slots).generate(part)
        }
        for slots, part in ((3, rows), (5, rows[::-1]))
    ]
    assert results[0] == results[1]
    assert {reason for _, reasons in results[0].values() for reason in reasons} == {"eos", "length"}


@pytest.mark.ci
def test_programs_are_one_a_bucket_and_none_the_second_time():
    net = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=128)
    with contextlib.closing(CompileClock()) as clock:
        engine = BatchGenerator(net, slots=4, num_beams=3)
        engine.generate(uneven_rows(20, prompts=32, new=16))
        # Prompts of up to 16 and 32 tokens, and the cache's.
        assert clock.programs == len(engine.counts.program_calls) == 3
        rows = uneven_rows(20, prompts=32, new=16, seed=1)
        for i, row in enumerate(rows):
            row |= {"length_penalty": i / 10, "eos_token_id": [i + 3, 2]}
            row["num_return_sequences"] = 1 + i % 3
        BatchGenerator(net, slots=4, num_beams=3).generate(rows)
        assert clock.programs == 3


@pytest.mark.slow
def test_decoding_sorts_no_vocabulary_and_copies_no_cache(monkeypatch):
    texts = []
    program = pools.decode_slots

    def spy(*arguments, **options):
        texts.append(compiled_as_users(program.lower(*arguments, **options)).as_text())
        return program(*arguments, **options)

    monkeypatch.setattr(pools, "decode_slots", spy)
    net = tiny.make("llama", num_hidden_layers=1, vocab_size=500)
    rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 3}] * 8
    engine = BatchGenerator(net, slots=8, num_beams=3)
    engine.generate(rows)
    assert all(size < 500 for size in sorted_sizes(texts[0]))
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", texts[0])
    layer = 8 * 2 * engine.memory[0].capacity * 8  # slots, heads, columns, their size
    assert all(math.prod(map(int, dims.split(","))) < layer for dims in copies)


@pytest.mark.slow
def test_beams_and_single_texts_in_one_batch():
    rows = beam_rows(6, seed=4, num_return_sequences=1)
    for i, row in enumerate(rows):
        row.pop("length_penalty")
        row["num_beams"] = 1 + i % 2
    check("llama", rows, slots=2)


@pytest.mark.slow
def test_stop_strings_of_each_row():
    net, tokenizer = jaxllm.load(DATA / "models" / "s_llama_tok")
    rng = np.random.default_rng(0)
    rows = [{"input_ids": rng.integers(3, 90, 6).tolist()} for _ in range(4)]
    fields = {"max_new_tokens": 8, "num_beams": 2, "eos_token_id": None}
    free = BatchGenerator(net, tokenizer, **fields).generate(rows)
    for row, output in zip(rows[1:], free[1:], strict=True):
        row["stop_strings"] = [tokenizer.decode(output.output_ids[0][3:5])[-2:]]
    outputs = BatchGenerator(net, tokenizer, slots=2, **fields).generate(rows)
    for row, output in zip(rows, outputs, strict=True):
        own = {"stop_strings": row["stop_strings"]} if "stop_strings" in row else {}
        expected = jaxllm.generate(net, [row["input_ids"]], tokenizer=tokenizer, **fields, **own)
        expected = np.asarray(expected.sequences)[0, 6:].tolist()
        assert output.output_ids[0] == expected[: len(output.output_ids[0])]
        assert set(expected[len(output.output_ids[0]) :]) <= {0}  # pads
    assert outputs[0].finish_reasons == ("length",)
    assert "stop" in {output.finish_reasons[0] for output in outputs[1:]}


@pytest.mark.ci
def test_a_text_that_never_began_was_ended_by_no_stop_string():
    """The penalty puts every text below the empty ones that a search begins with."""
    rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 3, "length_penalty": -1e30}]
    (output,) = BatchGenerator(model("llama"), num_beams=3).generate(rows)
    assert (output.output_ids, output.finish_reasons) == (([],), ("length",))


@pytest.mark.slow
def test_memory_knows_the_beams():
    """Predictions alone: no row runs."""
    rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 29, "num_return_sequences": 2}]
    engine = BatchGenerator(LONG, slots=4, num_beams=3, memory=nbytes(LONG) + 1)
    (output,) = engine.generate(rows)
    assert "29 new ones for each of 3 beams" in (output.error or "")
    assert "shorten the prompt" in (output.error or "")
    (actual,) = engine.memory
    assert actual.capacity == 32 + 2 * 32
    layer = 2 * actual.capacity * 2 * 8 * 4  # keys and values of 2 heads of 8
    assert layer < actual.cache < 2 * layer
    rows[0]["max_new_tokens"] = 3900
    (output,) = BatchGenerator(LONG, num_beams=3, memory=actual.total).generate(rows)
    assert output.error is not None
    assert int(output.error.split("at most ")[1].split(",")[0]) == 29


@pytest.mark.ci
def test_advice_is_about_new_tokens_where_the_prompt_takes_most():
    """Fewer of them make a slot smaller even if prompt and text still need as many columns."""
    row = {"input_ids": [5] * 60, "max_new_tokens": 32}
    engine = BatchGenerator(LONG, slots=1, num_beams=3, memory=nbytes(LONG) + 1)
    engine.generate([row])
    (actual,) = engine.memory
    row["max_new_tokens"] = 64
    (output,) = BatchGenerator(LONG, num_beams=3, memory=actual.total).generate([row])
    assert "ask for at most 32, or raise memory" in (output.error or "")


@pytest.mark.slow
def test_fewer_slots_where_memory_is_short():
    rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 20 + i} for i in range(8)]
    engine = BatchGenerator(LONG, slots=4, num_beams=3)
    expected = engine.generate(rows)
    (actual,) = engine.memory
    half = actual.weights + (actual.cache + actual.activations) // 2
    tight = BatchGenerator(LONG, slots=4, num_beams=3, memory=half)
    assert tight.generate(rows) == expected
    assert 1 <= tight.memory[0].slots <= 2
    rows = [{"input_ids": [5, 6, 7], "max_new_tokens": 29}]
    (output,) = BatchGenerator(LONG, num_beams=3, memory=half).generate(rows)
    assert output.error is None


@pytest.mark.ci
def test_an_error_is_its_rows_alone():
    rows = beam_rows(3, num_beams=3)
    rows[1]["suppress_tokens"] = list(range(50))
    rows[2]["low_memory"] = True
    outputs = BatchGenerator(model("llama"), slots=3).generate(rows)
    kinds = [output.error_kind for output in outputs]
    assert kinds == [None, "NonFiniteError", "UnsupportedError"]


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("sampled", [False, True])
def test_many_rows(family, sampled):
    net = tiny.make(family)
    rows = uneven_rows(203, seed=6)
    fields = {"num_beams": 4, "do_sample": sampled}
    for i, row in enumerate(rows):
        row |= {"length_penalty": (1.0, 2.0, 0.0)[i % 3], "num_return_sequences": 1 + i % 2}
    outputs = BatchGenerator(net, slots=16, seed=7, **fields).generate(rows)
    expected = [alone(net, row, i, seed=7, **fields) for i, row in enumerate(rows)]
    assert differences(net, rows, outputs, expected)[0] == []
