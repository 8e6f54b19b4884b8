"""`JaxLLMStage` called on batches, as Ray Data calls it, without Ray."""

from __future__ import annotations

import numpy as np
import pandas
import pyarrow
import pytest
from paths import ROOT

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch.job import JaxLLMStage
from jaxllm.batch.job.ray_actors import row_seed
from jaxllm.common.errors import DataError, InputError

MODEL = str(ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok")
ROWS = [
    {"id": "a", "input_ids": [5, 6, 7], "do_sample": False, "label": 3},
    {"id": "b", "input_ids": [8], "do_sample": True, "label": 1},
    {"id": "c", "input_ids": [], "do_sample": True, "label": 4},
    {"id": "d", "input_ids": [9, 10], "do_sample": True, "seed": 5, "label": 1},
]


@pytest.mark.ci
def test_results_are_those_of_the_rows_in_any_batch():
    stage = JaxLLMStage(MODEL, keep=["label"], slots=2, seed=9, max_new_tokens=6)
    table = pyarrow.Table.from_pylist([{"seed": None, **row} for row in ROWS])
    result = stage(table)
    lines = result.to_pylist()
    assert [(line["id"], line["label"]) for line in lines] == [(r["id"], r["label"]) for r in ROWS]
    engine = BatchGenerator(*jaxllm.load(MODEL), slots=2, max_new_tokens=6)
    rows = [{"seed": row_seed(9, row["id"]), **row} for row in ROWS]
    outputs = engine.generate([{k: v for k, v in row.items() if k != "label"} for row in rows])
    for output, line in zip(outputs, lines, strict=True):
        if line["id"] == "c":
            assert (line["error_kind"], line["text"]) == ("InputError", None)
            assert line["error"] == output.error
        else:
            own = {name: line[name] for name in ("id", "text", "output_ids", "finish_reason")}
            assert own == output.to_dict()
            assert line["error"] is None
    # Another batch, as numpy arrays; the types are those of the first.
    last = {
        "id": np.array(["d", "b"], object),
        "question": np.array([np.array([9, 10]), np.array([8])], object),
        "do_sample": np.array([True, True]),
        "label": np.array([1, 1]),
        "seed": np.array([5, row_seed(9, "b")]),
    }
    options = {"keep": ["label"], "slots": 2, "seed": 9, "max_new_tokens": 6}
    other = JaxLLMStage(MODEL, prompt_column="question", **options)(last)
    assert other.to_pylist() == [lines[3], lines[1]]
    assert other.schema == result.schema


@pytest.mark.ci
def test_several_sequences_are_lists_in_every_row():
    stage = JaxLLMStage(MODEL, slots=2, do_sample=True, max_new_tokens=6)
    rows = {"id": [1, 2], "input_ids": [[5], [5]], "num_return_sequences": [2, 1]}
    lines = stage(pyarrow.table(rows)).to_pylist()
    assert [len(line["output_ids"]) for line in lines] == [2, 1]
    assert all(isinstance(line["text"], list) for line in lines)


def test_templates_and_kept_columns():
    options = {"keep": ["Temperature"], "keep_prefix": "in_", "max_new_tokens": 2}
    stage = JaxLLMStage(MODEL, template="{{ q }} {{ seed }}", **options)
    rows = {"id": ["a", "b"], "q": ["Why", None], "seed": [3, None], "Temperature": [1.5, 2.5]}
    result = stage(pyarrow.table(rows))
    assert result.column_names[:3] == ["id", "in_Temperature", "text"]
    alone = jaxllm.BatchGenerator(*jaxllm.load(MODEL), max_new_tokens=2).generate(["Why 3", " "])
    assert result["text"].to_pylist() == [output.text for output in alone]


def test_missing_cells_of_numpy_and_pandas_batches():
    """Ray's pandas batches have NaN, and its numpy batches None, where a cell is missing."""
    stage = JaxLLMStage(MODEL, max_new_tokens=2)
    rows = {"id": ["a", "b"], "prompt": ["Why", None], "seed": [None, 4]}
    expected = stage(pyarrow.table(rows)).to_pylist()
    assert expected[0]["text"] is not None
    frame = pandas.DataFrame({**rows, "prompt": ["Why", float("nan")]})
    numpy_batch = {name: np.array(column, object) for name, column in rows.items()}
    for batch in (frame, frame.astype({"prompt": "string"}), numpy_batch):
        assert stage(batch).to_pylist() == expected


@pytest.mark.parametrize("several", [1, 2])
def test_types_do_not_depend_on_the_rows(several):
    """A batch whose rows all fail has the types of the others."""
    stage = JaxLLMStage(MODEL, do_sample=True, num_return_sequences=several, max_new_tokens=2)
    tables = [stage(pyarrow.table({"id": [1], "prompt": [text]})) for text in ("Why", "")]
    assert tables[1]["error"][0].is_valid
    assert tables[0].schema == tables[1].schema


def test_what_is_refused():
    rows = pyarrow.table({"id": [1], "prompt": ["a"], "text": ["b"]})
    with pytest.raises(InputError, match="keep: the output has a column 'text' of its own"):
        JaxLLMStage(MODEL, keep=["text"])(rows)
    stage = JaxLLMStage(MODEL)
    with pytest.raises(DataError, match="no column 'id'"):
        stage(pyarrow.table({"prompt": ["a"]}))
    with pytest.raises(DataError, match="name the column of the prompts"):
        stage(pyarrow.table({"id": [1], "question": ["a"]}))
