"""A row that is wrong, or whose numbers break, is an error of its own; others are unaffected."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxllm import BatchGenerator, generate_texts, score
from jaxllm.batch.rows import RawRow, RowReader
from jaxllm.common.errors import InputError

MODEL = tiny.make("llama", num_hidden_layers=1)
HUGE = 10**400
LONG = 10**5000
"""More digits than Python writes."""


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("input_ids", {"input_ids": [1, [2]]}),
        ("input_ids", {"input_ids": [[1], [2, 3]]}),
        ("length_penalty", {"num_beams": 2, "length_penalty": HUGE}),
        ("repetition_penalty", {"repetition_penalty": HUGE}),
        ("sequence_bias", {"sequence_bias": [[[1], -HUGE]]}),
        ("num_return_sequences", {"do_sample": True, "num_return_sequences": 2**31 - 1}),
        ("fields have names", {"temperature": 1.0, 5: 6}),
        ("suppress_tokens", {"suppress_tokens": [50]}),
        ("bad_words_ids", {"bad_words_ids": [[5, 50]], "num_beams": 2}),
        ("forced_eos_token_id", {"forced_eos_token_id": 50}),
    ],
)
def test_wrong_values_are_errors_of_their_row(name, fields):
    """Of each row that has them."""
    outputs = BatchGenerator(MODEL).generate([{"input_ids": [5], **fields}] * 2)
    for output in outputs:
        assert output.error_kind == "InputError"
        assert name in (output.error or "")


@pytest.mark.parametrize("rows", ["Hello", b"Hello", {"input_ids": [5]}, None, 5, np.array(5)])
@pytest.mark.parametrize(
    "call",
    [
        BatchGenerator(MODEL).generate,
        BatchGenerator(MODEL).stream,
        lambda rows: generate_texts(MODEL, rows),
        lambda rows: score(MODEL, rows, [[5]]),
        lambda rows: score(MODEL, [[5]], rows),
    ],
)
def test_a_single_row_is_no_list_of_rows(call, rows):
    with pytest.raises(InputError, match=r"(rows|prompts|completions): expected a list of"):
        call(rows)


@pytest.mark.parametrize(
    "value", [LONG, [LONG], {"a": LONG}, {LONG: 1}], ids=["int", "list", "value", "key"]
)
def test_an_integer_that_python_does_not_write_is_an_error_of_its_row(value):
    reader = RowReader(MODEL, None, {}, 0)
    wrong = [{"input_ids": [5], name: value} for name in ("seed", "id", "top_k", "suppress_tokens")]
    if isinstance(value, int):  # which is a valid id
        del wrong[1]
    for raw in [*wrong, {"input_ids": value}, {"prompt": value}, {LONG: value}]:
        with pytest.raises(InputError, match=r"integer of thousands of digits|found object"):
            reader.read(RawRow(0, 0, raw))


def test_settings_are_told_apart_by_all_their_values():
    """Rows share what was read of equal fields. Of a long array, numpy's `repr` shows the ends."""
    first, second = np.full((2, 2000), 3)
    second[1000] = 4
    reader = RowReader(MODEL, None, {}, 0)
    rows = [
        reader.read(RawRow(0, 0, {"input_ids": [5], "suppress_tokens": tokens}))
        for tokens in (first, second)
    ]
    assert [set(row.config.suppress_tokens) for row in rows] == [{3}, {3, 4}]
    row = reader.read(RawRow(0, 0, {"input_ids": [5], "sequence_bias": {(5,): 2.0}}))
    assert row.config.sequence_bias == (((5,), 2.0),)


@pytest.mark.ci
def test_a_neutral_value_asks_for_nothing():
    rows = [{"input_ids": [5], "max_new_tokens": 3} for _ in range(3)]
    rows[1] |= {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": None}
    engine = BatchGenerator(MODEL, slots=2)
    first, second, _ = engine.generate(rows)
    assert second.output_ids == first.output_ids
    assert len(engine.counts.program_calls) == 3


@pytest.mark.by_default("1")
@pytest.mark.parametrize("beams", [1, 3])
def test_what_a_broken_row_leaves_in_its_slot_is_gone(beams):
    """0 * NaN is NaN, so values behind the mask matter, too. The longer row runs first."""

    def broken(path: tuple, x: Any) -> Any:
        return x.at[7].set(np.nan) if "embed" in jax.tree_util.keystr(path) else x

    model = jax.tree_util.tree_map_with_path(broken, MODEL).with_card(MODEL.card)
    rows: list[dict[str, Any]] = [
        {"input_ids": [*[9] * 14, *[7] * 8], "max_new_tokens": 41},
        {"input_ids": [9, 10, 11], "max_new_tokens": 40, "eos_token_id": [49]},
    ]
    fields = {"num_beams": beams, "suppress_tokens": [7]}
    engine = BatchGenerator(model, slots=1, **fields)
    first, second = engine.generate(rows)
    assert first.error_kind == "NonFiniteError"
    assert second.error is None
    assert [second.output_ids] == [single.output_ids for single in engine.generate(rows[1:])]
