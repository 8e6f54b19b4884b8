"""`BatchGenerator.generate_table`: data frames and files in, the same kind out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow
import pytest
from conformance_runs import DATA

import jaxllm
from jaxllm.errors import DataError, InputError, MissingFileError, RunError

MODEL = DATA / "models" / "s_llama_tok"
COLUMNS = {
    "question": ["Why", "Who is it", None],
    "price": [1.5, 2.5, 3.5],
    "text": ["a", "b", "c"],
}
TEMPLATE = "{{ question }} costs {{ price }}"
RESULT = ["text", "output_ids", "finish_reason", "error", "error_kind"]


@pytest.fixture(scope="module")
def engine() -> jaxllm.BatchGenerator:
    return jaxllm.BatchGenerator(*jaxllm.load(MODEL), max_new_tokens=3, seed=1)


def frames() -> list[Any]:
    frame = pd.DataFrame(COLUMNS, index=[7, 3, 5])
    return [frame, pl.DataFrame(COLUMNS), pyarrow.table(COLUMNS)]


@pytest.mark.parametrize("number", range(3))
def test_frames_of_every_kind(engine: jaxllm.BatchGenerator, number: int):
    frame = frames()[number]
    result = engine.generate_table(
        frame, template=TEMPLATE, keep=["price", "text"], keep_prefix="in_"
    )
    assert type(result) is type(frame)
    columns = result.column_names if number == 2 else list(result.columns)
    assert columns == ["id", "row", "in_price", "in_text", *RESULT]
    prompts = ["Why costs 1.5", "Who is it costs 2.5", " costs 3.5"]
    expected = [output.text for output in engine.generate(prompts)]
    assert list(map(str, result["text"])) == expected
    assert list(map(float, map(str, result["in_price"]))) == COLUMNS["price"]
    if number == 0:
        assert list(result.index) == [7, 3, 5]
        joined = frame.join(result[["text"]].add_suffix("_new"))
        assert list(joined["text_new"]) == expected


def test_types_of_pandas_are_kept(engine: jaxllm.BatchGenerator):
    frame = pd.DataFrame(
        {
            "q": ["a", None],
            "kind": pd.Categorical(["x", "y"]),
            "day": pd.to_datetime(["2020-01-01", None]),
            "count": pd.array([1, None], dtype="Int64"),
            "n": [1.5, float("nan")],
        }
    )
    result = engine.generate_table(frame, template="{{ q }} {{ kind }} {{ count }} {{ n }}")
    kept = list(frame.columns)
    pd.testing.assert_frame_equal(result[kept], frame)
    expected = [output.text for output in engine.generate(["a x 1 1.5", " y  "])]
    assert list(result["text"]) == expected
    one = engine.generate_table(frame[:1], prompt_column="q", keep="day")
    assert list(one.columns)[:3] == ["id", "row", "day"]


def test_settings_of_columns_with_gaps(engine: jaxllm.BatchGenerator, tmp_path: Path):
    """pandas makes floats of integers where a cell is empty, also in the CSV that it writes."""
    frame = pd.DataFrame({"prompt": ["Why", "Who"], "max_new_tokens": [2, None]})
    result = engine.generate_table(frame)
    assert [len(ids) for ids in result["output_ids"]] == [2, 3]
    frame.to_csv(tmp_path / "rows.csv", index=False)
    engine.generate_table(tmp_path / "rows.csv", keep=(), output=tmp_path / "out.parquet")
    written = pd.read_parquet(tmp_path / "out.parquet")
    assert list(written["text"]) == list(result["text"])


def test_rows_that_fail(engine: jaxllm.BatchGenerator):
    frame = pd.DataFrame({"prompt": ["Why", "x"], "max_new_tokens": [2, 0]})
    result = engine.generate_table(frame)
    assert result["error"].isna().tolist() == [True, False]
    assert "max_new_tokens" in result["error"][1]


def test_files(engine: jaxllm.BatchGenerator, tmp_path: Path):
    pd.DataFrame(COLUMNS).to_csv(tmp_path / "rows.csv", index=False)
    output = tmp_path / "out.parquet"
    written = engine.generate_table(
        tmp_path / "rows.csv", template=TEMPLATE, keep=["question"], output=output
    )
    assert written == output
    frame = pd.read_parquet(output)
    assert list(frame.columns) == ["id", "row", "question", *RESULT]
    assert list(frame["question"]) == ["Why", "Who is it", ""]
    with pytest.raises(RunError, match="exists already"):
        engine.generate_table(tmp_path / "rows.csv", template=TEMPLATE, keep=(), output=output)


def test_what_is_refused(engine: jaxllm.BatchGenerator, tmp_path: Path):
    frame = pd.DataFrame(COLUMNS)
    for options, error, why in (
        ({"template": "{{ qestion }}"}, DataError, "template: no column 'qestion'; the nearest"),
        ({"template": TEMPLATE}, InputError, "has a column 'text' of its own"),
        ({"prompt_column": "question", "keep": ["price"], "output": "x"}, InputError, "output:"),
        ({"keep": ()}, DataError, "no column is called prompt"),
    ):
        with pytest.raises(error, match=why):
            engine.generate_table(frame, **options)
    with pytest.raises(InputError, match="table: expected a pandas or Polars data frame"):
        engine.generate_table([{"prompt": "x"}])
    with pytest.raises(InputError, match=r"table: .*column mixed"):
        engine.generate_table(pd.DataFrame({"mixed": [1, "a"]}), template="{{ mixed }}")
    with pytest.raises(InputError, match="'LazyFrame'"):
        engine.generate_table(pl.DataFrame(COLUMNS).lazy())
    with pytest.raises(InputError, match="the column 'price' is there twice"):
        engine.generate_table(pd.concat([frame, frame[["price"]]], axis=1))
    with pytest.raises(InputError, match="output: give the file of the results"):
        engine.generate_table(tmp_path / "rows.csv")


@pytest.mark.parametrize("wrong", [{"keep": None}, {"keep": 5}, {"keep": [1]}, {"template": 5}])
def test_arguments_of_wrong_types(engine: jaxllm.BatchGenerator, wrong: dict[str, Any]):
    with pytest.raises(InputError):
        engine.generate_table(pd.DataFrame({"prompt": ["a"]}), **wrong)


def test_outputs_are_checked_before_generating(engine: jaxllm.BatchGenerator, tmp_path: Path):
    (tmp_path / "in.csv").write_text("prompt\na\n")
    with pytest.raises(MissingFileError, match="no such folder"):
        engine.generate_table(tmp_path / "in.csv", output=tmp_path / "none" / "out.csv")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["q", "q"])
    with pytest.raises(DataError, match="the column 'q' is there twice"):
        engine.generate_table(table, prompt_column="q")


def test_types_of_frames_without_a_success(engine: jaxllm.BatchGenerator):
    tables = [
        engine.generate_table(pyarrow.table({"prompt": ["a"], "top_k": [k]}), keep=())
        for k in (None, -1)
    ]
    assert tables[1]["error"][0].is_valid
    assert tables[0].schema == tables[1].schema


def test_templates_in_files(engine: jaxllm.BatchGenerator, tmp_path: Path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    frame = pd.DataFrame(COLUMNS).drop(columns="text")
    expected = engine.generate_table(frame, template=TEMPLATE)
    for name in (tmp_path / "t.jinja", str(tmp_path / "t.jinja")):
        pd.testing.assert_frame_equal(engine.generate_table(frame, template=name), expected)


def test_names_in_one_text(engine: jaxllm.BatchGenerator):
    frame = pd.DataFrame({"prompt": ["a"], "b": [1], "c": [2]})
    result = engine.generate_table(frame, keep="b, c")
    assert list(result.columns[:4]) == ["id", "row", "b", "c"]


def test_frames_that_are_no_rows(engine: jaxllm.BatchGenerator):
    frame = pd.DataFrame({"prompt": ["a"]})
    for use in (
        engine.generate,
        engine.stream,
        lambda rows: jaxllm.generate_texts(engine.model, rows, tokenizer=engine.tokenizer),
    ):
        for rows in (frame, pyarrow.Table.from_pandas(frame)):
            with pytest.raises(InputError, match="pass one of its columns"):
                use(rows)
    with pytest.raises(InputError, match=r"column ticket .*; give it one type"):
        engine.generate_table(pd.DataFrame({"prompt": ["a", "b"], "ticket": ["a", 2]}))
