"""Cells of real tables: bytes, dates, kept types, delimiters, and lines that cannot be read."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pyarrow.parquet as pq
import pytest
from conformance_runs import DATA
from recorded_job import RecordedEngine, run

import jaxllm
from jaxllm.batch.job.job import Job
from jaxllm.batch.rows import BatchOutput, error_output
from jaxllm.batch.tables import ColumnChoice, Source, read_source
from jaxllm.batch.tables.columns import RowTemplate
from jaxllm.batch.tables.source import has_types
from jaxllm.common.errors import ConfigError, DataError, InputError, JaxLLMError
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, large_files
from jaxllm.training.data import rows as rows_module
from jaxllm.training.data.pipeline import check_fields, read_examples, rows_of

WHY, CAFE = "Why?", "café"
LATIN = CAFE.encode("latin-1")
BINARIES = [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.binary(5)]
INFO = ModelInfo(kind="causal", vocab_size=384, context_length=256)


@pytest.fixture(scope="module")
def engine() -> jaxllm.BatchGenerator:
    return jaxllm.BatchGenerator(*jaxllm.load(DATA / "models" / "s_llama_tok"), max_new_tokens=3)


class ReadingEngine(RecordedEngine):
    """Answers a row with its prompt, and a row with an error with that."""

    def answer(self, rows: Any) -> Iterator[BatchOutput]:
        for row in rows:
            if isinstance(row.raw, JaxLLMError):
                output = error_output(row, row.raw)
                self.counts.add_output(output)
                yield output
            else:
                yield from super().answer([row])


def written(folder: Path, table: Any, kind: str) -> Path:
    """A table as a file or a folder, by the writer of a library."""
    if kind == "datasets":
        datasets.Dataset(table).save_to_disk(str(folder / "set"))
        return folder / "set"
    if kind == "pandas":
        table.to_pandas().to_parquet(folder / "rows.parquet")
    elif kind == "polars":
        pl.DataFrame(table).write_parquet(folder / "rows.parquet")
    else:
        pq.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def answered(folder: Path, path: Path, output: str, **choice: Any) -> Path:
    engine: Any = ReadingEngine()
    output_path = folder / output
    source = read_source(path, ColumnChoice(**choice), keeps_types=has_types(output_path))
    run(Job(engine, source, output_path, {"--model": "m"}))
    return output_path


def prompts(source: Source) -> list[Any]:
    return [source.row(index).raw for index in range(len(source))]


def template(text: str) -> RowTemplate:
    return RowTemplate(text, "--template")


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars", "datasets"])
def test_bytes_are_text(tmp_path, kind):
    """As Impala, Hive and Spark write texts; also within lists and structs, and without an error
    in columns that are not used."""
    table = pyarrow.table(
        {
            "q": pyarrow.array([WHY.encode(), CAFE.encode(), LATIN, None]),
            "who": [{"name": b"Ann"}, {"name": b"Bo"}, {"name": b"Cy"}, {"name": b"Di"}],
            "tags": [[b"a", b"b"], [b"c"], [], [LATIN]],
            "image": [LATIN] * 4,
        }
    )
    path = written(tmp_path, table, kind)
    text = "{{ q }} {{ who.name }}{% for x in tags %} {{ x }}{% endfor %}"
    choice = {"template": template(text), "keep": ("q", "who")}
    found = prompts(read_source(path, ColumnChoice(**choice)))
    assert [row["prompt"] for row in found[:2]] == [f"{WHY} Ann a b", f"{CAFE} Bo c"]
    assert "column 'q': holds bytes that are not UTF-8 text (byte 3)" in str(found[2])
    assert str(path) in str(found[2]) or "set" in str(found[2])
    assert "column 'tags': holds bytes" in str(found[3])
    lines = answered(tmp_path, path, "out.jsonl", **choice).read_text().splitlines()
    first, second, third, _ = map(json.loads, lines)
    assert (first["q"], first["who"]) == (WHY, {"name": "Ann"})
    assert second["q"] == CAFE
    assert third["q"] is None
    assert third["error"].startswith("row 2: column 'q': ")
    assert third["who"] == {"name": "Cy"}
    kept = pq.read_table(answered(tmp_path, path, "out.parquet", **choice))
    assert kept["q"].to_pylist() == table["q"].to_pylist()
    assert pyarrow.types.is_binary(kept["q"].type) or pyarrow.types.is_large_binary(kept["q"].type)


@pytest.mark.parametrize("binary", BINARIES, ids=str)
def test_every_type_of_bytes(tmp_path, binary):
    data = [CAFE.encode()] * 2
    pq.write_table(pyarrow.table({"q": pyarrow.array(data, binary)}), tmp_path / "rows.parquet")
    source = read_source(tmp_path / "rows.parquet", ColumnChoice(prompt="q", keep="all"))
    assert source.row(0).raw == {"prompt": CAFE}
    assert source.kept(0) == {"q": CAFE}
    config = DataConfig(format="text", text_field="q", path=str(tmp_path / "rows.parquet"))
    assert rows_of(config)[0]["q"] == CAFE


def test_kept_bytes_in_text_outputs(tmp_path):
    """An error of the row in JSONL and CSV; Parquet keeps them as they are."""
    pq.write_table(
        pyarrow.table({"prompt": ["a", "b"], "image": [b"x", LATIN]}), tmp_path / "r.parquet"
    )
    for output in ("out.jsonl", "out.csv", "out.parquet.gz"):
        answered(tmp_path, tmp_path / "r.parquet", output, keep=("image",))
        errors = tmp_path / f"{output}.errors.jsonl"
        if output == "out.parquet.gz":
            assert not errors.exists()
        else:
            (line,) = map(json.loads, errors.read_text().splitlines())
            assert "column 'image'" in line["failed_row"]["error"]
            assert (line["prompt"], "image" in line) == ("b", False)


def test_frames_of_bytes(engine):
    frame = pd.DataFrame({"q": [WHY.encode(), CAFE.encode(), LATIN]})
    expected = [output.text for output in engine.generate([WHY, CAFE])]
    result = engine.generate_table(frame, prompt_column="q")
    assert list(result["text"][:2]) == expected
    assert "column 'q'" in result["error"][2]
    assert list(result["q"]) == list(frame["q"])
    result = engine.generate_table(pl.DataFrame({"q": [WHY.encode()]}), prompt_column="q")
    assert (result["text"][0], result["q"].dtype) == (expected[0], pl.Binary)
    objects = pl.DataFrame({"q": pl.Series([WHY.encode(), object()], dtype=pl.Object)})
    with pytest.raises(InputError, match="table: the column 'q' holds Python objects"):
        engine.generate_table(objects, prompt_column="q")


@pytest.mark.parametrize("source", ["parquet", "large", "dataset", "list", "frame"])
def test_training_texts_from_bytes(tmp_path, monkeypatch, source):
    """Columns that are not used may hold anything."""
    day = pyarrow.array([10**12], pyarrow.int64()).view(pyarrow.timestamp("s"))
    pairs = {"prompt": [CAFE.encode(), b"x"], "completion": [b"yes", LATIN], "image": [LATIN] * 2}
    table = pyarrow.table({**pairs, "day": pyarrow.concat_arrays([day, day])})
    path: str | None = str(written(tmp_path, table, "arrow"))
    rows: Any = None
    if source == "large":
        monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(large_files, "LARGE_BYTES", 0)
    elif source != "parquet":
        path = None
        rows = datasets.Dataset(table)
        if source == "list":
            rows = pyarrow.table(pairs).to_pylist()
        if source == "frame":
            rows = pyarrow.table(pairs).to_pandas().to_dict("records")
    config = DataConfig(format="prompt_completion", path=path)
    with pytest.raises(DataError, match=r"\[1\]: column 'completion': holds bytes that are not"):
        read_examples(config, byte_tokenizer(), INFO, rows)
    opened = rows_of(config, rows)
    assert (opened[0]["prompt"], opened[0]["completion"]) == (CAFE, "yes")
    config = DataConfig(format="text", path=path, templates={"text": "{{ prompt }}!"})
    examples = read_examples(config, byte_tokenizer(), INFO, rows)
    assert examples.items[0].input_ids[:-1].tolist() == [*f"{CAFE}!".encode()]


def test_byte_tokenizers_learn_bytes():
    rows: Any = [{"text": b"\xff\x00"}]
    examples = read_examples(DataConfig(format="text"), byte_tokenizer(), INFO, rows)
    assert examples.items[0].input_ids[:-1].tolist() == [255, 0]


def test_numbers_are_printed_alike_everywhere(tmp_path, engine):
    """In jobs, frames and training, in float32 too, and for scalars of numpy and Arrow."""
    text = "{{ n }} {{ m }} {{ d }} {{ '%.2f' % n }}"
    decimals = [Decimal("5.00"), Decimal("0.00")]
    columns = {
        "n": pyarrow.array([5.0, 0.1], pyarrow.float32()),
        "m": pyarrow.array([1889.0, 0.5]),
        "d": pyarrow.array(decimals, pyarrow.decimal128(18, 8)),
    }
    table = pyarrow.table(columns)
    expected = ["5 1889 5.00000000 5.00", "0.1 0.5 0.00000000 0.10"]
    path = written(tmp_path, table, "arrow")
    source = read_source(path, ColumnChoice(template=template(text)))
    assert [row["prompt"] for row in prompts(source)] == expected
    scalars = [{name: column[i] for name, column in columns.items()} for i in range(2)]
    numpy_rows = [{"n": np.float32(5), "m": np.float64(1889), "d": Decimal("5.00000000")}]
    for rows in (None, datasets.Dataset(table), scalars, numpy_rows):
        config = DataConfig(
            format="text", path=str(path) if rows is None else None, templates={"text": text}
        )
        opened = rows_of(config, rows)
        assert [opened[i]["text"] for i in range(len(opened))] == expected[: len(opened)]
    result = engine.generate_table(table, template=text)
    assert result["text"].to_pylist() == [each.text for each in engine.generate(expected)]
    answered(tmp_path, path, "out.csv", template=template(text), keep="all")
    assert (tmp_path / "out.csv").read_text().splitlines()[1].startswith("0,0,5,1889,5.00000000,")


def test_ids_and_labels_with_gaps(tmp_path):
    """Integers that pandas stores as floats."""
    frame = pd.DataFrame({"id": [7, None], "prompt": ["a", "b"], "label": [1, None]})
    frame.to_parquet(tmp_path / "rows.parquet")
    source = read_source(tmp_path / "rows.parquet")
    assert [source.row(index).row_id for index in range(2)] == [7, 1]
    config = DataConfig(
        format="classification", text_field="prompt", path=str(tmp_path / "rows.parquet")
    )
    info = ModelInfo(kind="classification", vocab_size=384, context_length=64, num_labels=2)
    with pytest.raises(DataError, match=r"\[1\]: label: expected a class"):
        read_examples(config, byte_tokenizer(), info)
    rows = [{"prompt": "a", "label": 1.0}]
    examples = read_examples(
        DataConfig(format="classification", text_field="prompt"), byte_tokenizer(), info, rows
    )
    assert examples.items[0].labels.tolist() == 1


def view(values: list[int], kind: Any) -> Any:
    """Numbers as Arrow stores times."""
    width = pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64()
    return pyarrow.array(values, width).view(kind)


TIMES = {
    "timestamp": (view([10**12, 0], pyarrow.timestamp("s")), "1970-01-01 00:00:00"),
    "zone": (view([253402300800, 0], pyarrow.timestamp("s", "UTC")), "1970-01-01 00:00:00+00:00"),
    "date": (view([10**7, 0], pyarrow.date32()), "1970-01-01"),
    "date64": (view([10**16, 0], pyarrow.date64()), "1970-01-01"),
    "duration": (view([2**62, 86400], pyarrow.duration("s")), "1 day, 0:00:00"),
    "list": (
        pyarrow.ListArray.from_arrays([0, 1, 2], view([10**12, 0], pyarrow.timestamp("s"))),
        "[datetime.datetime(1970, 1, 1, 0, 0)]",
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_beyond_python_are_errors_of_their_row(tmp_path, engine, name):
    column, text = TIMES[name]
    table = pyarrow.table({"q": ["a", "b"], "t": column})
    choice = {"template": template("{{ q }} {{ t }}")}
    sources: list[Any] = [
        Source(jaxllm.batch.tables.read.table_of_frame(table)[0], ColumnChoice(**choice))
    ]
    if name not in ("date64", "duration"):
        sources.append(read_source(written(tmp_path, table, "arrow"), ColumnChoice(**choice)))
    sources.append(read_source(written(tmp_path, table, "datasets"), ColumnChoice(**choice)))
    for source in sources:
        source.check_rows()
        first, second = prompts(source)
        assert "column 't': the " in str(first)
        assert "years from 1 to 9999" in str(first)
        assert second == {"prompt": f"b {text}"}
    result = engine.generate_table(table, template="{{ q }} {{ t }}")
    assert "column 't'" in result["error"][0].as_py()
    assert result["t"].equals(table["t"])
    kept = engine.generate_table(table, prompt_column="q")  # which does not use the cell
    assert kept["error"].null_count == 2
    rows: Any = datasets.Dataset(table)
    config = DataConfig(format="text", templates={"text": "{{ t }}"})
    with pytest.raises(DataError, match=r"rows\[0\]: templates.text|rows\[0\]: column 't'"):
        read_examples(config, byte_tokenizer(), INFO, rows)


def test_nanoseconds_and_zones(tmp_path):
    columns = {
        "a": view([1], pyarrow.timestamp("ns")),
        "b": view([10**9], pyarrow.timestamp("ns", "Europe/Berlin")),
        "c": view([86400 * 10**9], pyarrow.duration("ns")),
        "d": view([1], pyarrow.time64("ns")),
        "e": view([0], pyarrow.timestamp("s", "No/Where")),
    }
    table = pyarrow.table(columns)
    choice = ColumnChoice(template=template("{{ a }}|{{ b }}|{{ c }}|{{ d }}"))
    source = Source(jaxllm.batch.tables.read.table_of_frame(table)[0], choice)
    times = "1970-01-01 00:00:00.000000001|1970-01-01 01:00:01+01:00|1 day, 0:00:00"
    assert prompts(source)[0]["prompt"] == f"{times}|00:00:00.000000001"
    choice = ColumnChoice(template=template("{{ e }}"))
    source = Source(jaxllm.batch.tables.read.table_of_frame(table)[0], choice)
    assert "a known time zone" in str(prompts(source)[0])


def test_kept_columns_keep_their_types(tmp_path):
    day = datetime.date(2026, 11, 25)
    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "gaps": pyarrow.array([1889.0, None]),
            "day": pyarrow.array([day, None]),
            "price": pyarrow.array([Decimal("1.50"), None]),
            "data": pyarrow.array([LATIN, None]),
            "list": pyarrow.array([[1.0, 2.5], None]),
            "struct": pyarrow.array([{"x": b"\xff", "y": None}, None]),
            "wide": view([10**12, 0], pyarrow.timestamp("us")),
        }
    )
    for kind in ("arrow", "datasets"):
        path = written(tmp_path, table, kind)
        kept = pq.read_table(
            answered(tmp_path, path, f"{kind}.parquet", keep="all", keep_prefix="k_")
        )
        for name in table.column_names:
            assert kept[f"k_{name}"].combine_chunks().equals(table[name].combine_chunks())


def test_kept_columns_of_frames_are_the_frame_s_own(engine):
    """Also of types that Arrow lacks or changes."""
    frame = pd.DataFrame(
        {
            "prompt": ["a", "b"],
            "mixed": ["x", b"y"],
            "list": [[1], [2, 3]],
            "struct": [{"a": 1}, {"b": 2}],
            "year": pd.period_range("2020", "2021", freq="Y"),
            "gaps": [1.0, None],
        },
        index=[7, 3],
    )
    result = engine.generate_table(frame, keep_prefix="k_", template="{{ year }} {{ mixed }}")
    assert list(result.index) == [7, 3]
    for name in frame.columns:
        assert result[f"k_{name}"].dtype == frame[name].dtype
        assert list(map(repr, result[f"k_{name}"])) == list(map(repr, frame[name]))
    expected = engine.generate(["2020 x", "2021 y"])
    assert list(result["text"]) == [output.text for output in expected]
    kinds = {"prompt": pl.String, "kind": pl.Enum(["x", "y"]), "pair": pl.Array(pl.Int8, 2)}
    polars = pl.DataFrame({"prompt": ["a"], "kind": ["x"], "pair": [[1, 2]]}, schema=kinds)
    result = engine.generate_table(polars)
    assert {name: result.schema[name] for name in kinds} == dict(polars.schema)
    with pytest.raises(InputError, match=r"table: .*_pli128"):
        engine.generate_table(pl.DataFrame({"prompt": ["a"], "n": pl.Series([1], dtype=pl.Int128)}))


UNREADABLE = {
    "a.jsonl": ("{a\n[1]\n", "line 1: not JSON.*; line 2: is list, not an object"),
    "b.jsonl": ('{"id": 1}\n{"q": \n', "no column 'q'.*line 2: not JSON"),
    "c.csv": ("id,q\n1\n2,b,c\n", "line 2: has 1 cells, but the header 2; line 3: has 3 cells"),
    "d.jsonl": ("\n", "d.jsonl: has no rows"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_inputs_without_a_line_that_can_be_read(tmp_path, engine, name):
    content, why = UNREADABLE[name]
    path = tmp_path / name
    path.write_text(content)
    for choice in (
        {"prompt_column": "q"},
        {"template": "{{ q }}"},
        {"prompt_column": "q", "keep": "q"},
    ):
        with pytest.raises(DataError, match=why):
            engine.generate_table(path, output=tmp_path / "out.jsonl", **{"keep": (), **choice})
    if name[0] in "ac":
        config = DataConfig(format="text", text_field="q", path=str(path))
        with pytest.raises(DataError, match=r":[12]: "):
            check_fields(config)


SEMICOLONS = 'id;q\n1;"Why; exactly?"\n2;x, y\n'


@pytest.mark.parametrize("mark", [";", "\t"])
@pytest.mark.parametrize("header", ["id;q", '"id";"q"', '\ufeff"id";q', '"a, b";q', "\nid;q"])
def test_other_delimiters_must_be_named(tmp_path, mark, header):
    text = SEMICOLONS.replace("id;q", header).replace(";", mark)
    (tmp_path / "rows.csv").write_text(text)
    for read in (
        lambda: read_source(tmp_path / "rows.csv", ColumnChoice(prompt="q")),
        lambda: rows_of(DataConfig(format="text", path=str(tmp_path / "rows.csv"))),
    ):
        with pytest.raises(DataError, match=r"rows\.csv: the first line has .*--delimiter \(deli"):
            read()
    choice = ColumnChoice(prompt="q")
    rows = prompts(read_source(tmp_path / "rows.csv", choice, delimiter=mark))
    assert [row["prompt"] for row in rows] == [f"Why{mark} exactly?", "x, y"]


@pytest.mark.parametrize(
    "header", ["q", '"q; or ""a""\tb"', "q|r", "a;b,q", "", '"q;\nr"'], ids=lambda text: text[:4]
)
def test_headers_that_commas_separate(tmp_path, header):
    header = header or "q"
    (tmp_path / "rows.csv").write_text(header + "\n" + ("1,2" if "," in header else "1") + "\n")
    source = read_source(
        tmp_path / "rows.csv", ColumnChoice(template=template("{{ row | length }}{{ row }}"))
    )
    assert source.row(0).raw["prompt"].startswith("2" if "," in header else "1")


def test_delimiters_in_every_entrance(tmp_path, monkeypatch, engine):
    path = tmp_path / "rows.csv"
    path.write_text(SEMICOLONS)
    tsv = tmp_path / "rows.tsv"
    tsv.write_text("id\tq\n1\tWhy; exactly?\n2\tx, y\n")
    expected = engine.generate_table(tsv, prompt_column="q", keep=(), output=tmp_path / "t.jsonl")
    made = engine.generate_table(
        path, prompt_column="q", keep=(), output=tmp_path / "c.jsonl", delimiter=";"
    )
    assert made.read_bytes() == expected.read_bytes()
    with pytest.raises(InputError, match=r"--delimiter: only for \.csv files"):
        engine.generate_table(tsv, prompt_column="q", output=tmp_path / "x.csv", delimiter=";")
    with pytest.raises(InputError, match=r"delimiter: only for the path of a \.csv file"):
        engine.generate_table(pd.DataFrame({"prompt": ["a"]}), delimiter=";")
    for wrong in (";;", "", '"', "\n", 5):
        with pytest.raises(InputError, match="delimiter: expected one character"):
            read_source(path, delimiter=wrong)
        with pytest.raises(ConfigError, match="delimiter: "):
            DataConfig(format="text", path=str(path), delimiter=wrong)
    with pytest.raises(ConfigError, match="delimiter: has no effect with dataset"):
        DataConfig(format="text", dataset="x", delimiter=";")
    with pytest.raises(DataError, match=r"delimiter: only for \.csv files"):
        rows_of(DataConfig(format="text", path=str(tsv), delimiter=";"))
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    for size in (large_files.LARGE_BYTES, 0):
        monkeypatch.setattr(large_files, "LARGE_BYTES", size)
        both = (str(path), str(tsv))
        rows = rows_of(DataConfig(format="text", text_field="q", path=both, delimiter=";"))
        assert [rows[i]["q"] for i in range(4)] == ["Why; exactly?", "x, y"] * 2
        with pytest.raises(DataError, match="--delimiter"):
            rows_of(DataConfig(format="text", text_field="q", path=str(path)))
    assert rows_module.open_rows(path, delimiter=";").where(0) == f"{path}:2"
