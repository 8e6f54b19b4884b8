"""Rows that run in batches of `generate`: diverse beams, and whatever else no slot holds."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
import tiny
from batch_tools import differences

from jaxllm import BatchGenerator
from jaxllm.batch import task_run
from jaxllm.batch.row_groups import fits_slots
from jaxllm.batch.rows import RawRow
from jaxllm.common.errors import InputError
from jaxllm.generation.settings.config import FIELDS
from jaxllm.tokenizers.byte_level import byte_tokenizer

SMALL = {"llama": {"num_hidden_layers": 1}, "t5": {"num_layers": 1, "num_decoder_layers": 1}}
BEAMS = {"num_beams": 3, "encoder_repetition_penalty": 1.2}
"""With a field that no slot has."""
DIVERSE = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}


@functools.cache
def model(family: str) -> Any:
    return tiny.make(family, **SMALL[family])


def three_rows(**fields: Any) -> list[dict[str, Any]]:
    sizes = (3, 9, 14)
    return [{"input_ids": list(range(5, 5 + n)), "max_new_tokens": 8, **fields} for n in sizes]


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_beams_equal_beams_alone(family):
    rows = three_rows(**BEAMS, num_return_sequences=2)
    rows[1] |= {"length_penalty": 2.0}
    rows.insert(1, {"input_ids": [5, 6, 7], "max_new_tokens": 8})  # goes to a slot
    engine = BatchGenerator(model(family), slots=6)
    outputs = engine.generate(rows)
    assert [len(output.output_ids) for output in outputs] == [2, 1, 2, 2]
    assert differences(model(family), rows, outputs)[0] == []
    assert engine.counts.program_calls["beam_search of 2 x 16"] == 1
    assert engine.counts.program_calls["beam_search of 1 x 16"] == 1


@pytest.mark.by_default("cache_implementation")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"penalty_alpha": 0.5, "top_k": 3}, marks=pytest.mark.slow),
        {"encoder_repetition_penalty": 1.5},
        pytest.param(DIVERSE, marks=pytest.mark.slow),
        {"cache_implementation": "quantized", "cache_config": {"nbits": 8}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_other_settings_equal_rows_alone(fields):
    rows = three_rows(**fields)[:1]
    outputs = BatchGenerator(model("llama"), slots=4).generate(rows)
    assert differences(model("llama"), rows, outputs)[0] == []


def test_min_length_counts_the_prompt_of_each_row():
    """Of prompts in one bucket, beside each other."""
    fields = {"num_beams": 2, "encoder_repetition_penalty": 1.2, "early_stopping": True}
    fields |= {"min_length": 9, "eos_token_id": 2, "logit_bias": {2: 100.0}}  # it ends early
    outputs = BatchGenerator(model("llama"), slots=6).generate(three_rows(**fields))
    assert [len(output.output_ids[0]) for output in outputs] == [7, 1, 1]
    assert [output.finish_reasons for output in outputs] == [("eos",)] * 3


@pytest.mark.ci
def test_an_error_is_its_rows_alone():
    rows = three_rows(**BEAMS)
    rows[1]["suppress_tokens"] = list(range(50))
    outputs = BatchGenerator(model("llama"), slots=12).generate(rows)
    assert [output.error_kind for output in outputs] == [None, "NonFiniteError", None]


@pytest.mark.ci
def test_batches_are_halved_when_memory_runs_out(monkeypatch):
    rows = three_rows(**BEAMS)
    expected = BatchGenerator(model("llama"), slots=12).generate(rows)
    generate = task_run.generate

    def refuse(net, ids, *arguments, **options):
        if len(ids) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return generate(net, ids, *arguments, **options)

    monkeypatch.setattr(task_run, "generate", refuse)
    engine = BatchGenerator(model("llama"), slots=12)
    assert engine.generate(rows) == expected
    assert engine.counts.halvings == 2  # 4 rows at once, 2, 1


@pytest.mark.ci
def test_stop_strings_beside_other_samples_and_at_the_limit():
    """The pads after a stop string may be EOS tokens."""
    net = tiny.make("llama", **SMALL["llama"] | {"vocab_size": 258, "eos_token_id": 256})
    lookup = {
        "input_ids": [104, 105],
        "do_sample": True,
        "num_return_sequences": 3,
        "seed": 3,
        "suppress_tokens": list(range(128, 256)),  # what is left is one character each
        "prompt_lookup_num_tokens": 3,
        "max_new_tokens": 12,
    }
    engine = BatchGenerator(net, byte_tokenizer())
    first, *others = engine.generate([lookup])[0].output_ids
    number = next(i for i, token in enumerate(first) if not any(token in ids for ids in others))
    stop = {"stop_strings": [chr(first[number])]}
    for limit in (12, number + 1):
        (output,) = engine.generate([{**lookup, **stop, "max_new_tokens": limit}])
        assert output.output_ids == (first[: number + 1], *(ids[:limit] for ids in others))
        assert output.finish_reasons == ("stop", "length", "length")


def test_rows_that_run_in_slots():
    """Greedy search, sampling and plain beams do; every field that asks for more goes elsewhere."""
    reader = BatchGenerator(model("llama"))._reader
    given = {
        "guidance_scale": 1.5,
        "watermarking_config": {"greenlist_ratio": 0.25},
        "encoder_no_repeat_ngram_size": 2,
        "max_time": 100.0,
        "max_cache_len": 64,
    }
    rows = [{"num_beams": beams, **{name: given[name]}} for name in given for beams in (1, 2)]
    for fields in [*rows, DIVERSE, {"num_beams": 2, "force_words_ids": [[7]]}]:
        assert fields.keys() <= FIELDS.keys()
        raw = {"input_ids": [5], "max_new_tokens": 3, **fields}
        assert not fits_slots(reader.read(RawRow(0, 0, raw)))
    for fields in ({"length_penalty": 1.0, "use_cache": True}, {"num_beams": 2, "top_k": 50}):
        raw = {"input_ids": [5], "max_new_tokens": 3, **fields}
        assert fits_slots(reader.read(RawRow(0, 0, raw)))


def test_fields_of_all_rows_are_checked_at_once():
    with pytest.raises(InputError, match="temprature"):
        BatchGenerator(model("llama"), temprature=1.0)
    with pytest.raises(InputError, match="slots"):
        BatchGenerator(model("llama"), slots=0)
    with pytest.raises(InputError, match="seed"):
        BatchGenerator(model("llama"), seed=2**32)
