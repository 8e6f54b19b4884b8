"""Kinds of inputs and outputs: what is read, what is refused, and what is written."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet as pq
import pytest
from recorded_job import RecordedEngine, run

from jaxllm.batch.job.job import Job
from jaxllm.batch.tables import ColumnChoice, Source, read, read_source, table
from jaxllm.batch.tables.source import OutputTable, output_writer
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import DataError, JaxLLMError, MissingExtraError, UnsupportedError

QUESTION = ColumnChoice(prompt="question")
HAIKU = 'Snow, "quoted",\nand a second line'


def csv_text(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


KINDS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "rows.jsonl": jsonl,
    "rows.jsonl.gz": lambda rows: gzip.compress(jsonl(rows)),
    "rows.csv": csv_text,
    "rows.csv.gz": lambda rows: gzip.compress(csv_text(rows)),
    "rows.tsv": lambda rows: (
        b"question\tid\ttemperature\ttopic\n"
        + b"".join(
            '"{}"\t{}\t{}\t{}\n'.format(
                row["question"].replace('"', '""'), *list(row.values())[1:]
            ).encode()
            for row in rows
        )
    ),
    "rows.parquet": parquet,
    "rows.parquet.gz": lambda rows: gzip.compress(parquet(rows)),
}
ROWS = [
    {"question": HAIKU, "id": "a", "temperature": 0.5, "topic": "snow"},
    {"question": "12", "id": "b", "temperature": 1.0, "topic": "numbers"},
]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    (tmp_path / name).write_bytes(KINDS[name](ROWS))
    source = read_source(tmp_path / name, QUESTION)
    source.check_rows()
    rows = [source.row(index).raw for index in range(len(source))]
    assert rows == [
        {"prompt": HAIKU, "id": "a", "temperature": 0.5},
        {"prompt": "12", "id": "b", "temperature": 1.0},
    ]
    assert source.unread == ["topic"]
    assert source.identity["--prompt-column"] == "question"


def test_data_sets_of_a_folder(tmp_path):
    messages = [[{"role": "user", "content": text}] for text in ("Why?", "How?")]
    data = datasets.Dataset.from_dict({"chat": messages, "answer": ["a", "b"]})
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "splits"))
    choice = ColumnChoice(prompt="chat")
    one = read_source(tmp_path / "one", choice)
    assert [one.row(i).raw for i in range(len(one))] == [{"messages": each} for each in messages]
    assert read_source(tmp_path / "splits", choice, split="test").sha256 == one.sha256
    with pytest.raises(DataError, match="'train', cannot be loaded"):
        read_source(tmp_path / "splits", choice)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("prompt\nHello\n")
    files = read_source(tmp_path / "files")
    assert files.row(0).raw == {"prompt": "Hello"}
    assert files.unit == "row"


def test_stdin(monkeypatch):
    for data in (jsonl([{"prompt": "Hi"}]), gzip.compress(jsonl([{"prompt": "Hi"}]))):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert read_source("-").row(0).raw == {"prompt": "Hi"}
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(parquet(ROWS))))
    with pytest.raises(DataError, match="stdin: expected JSONL, found Parquet; save it as a file"):
        read_source("-")


REFUSED = {
    "rows.parquet": (b"id,prompt\n1,Hi\n", "expected Parquet, found text"),
    "rows.csv": (parquet(ROWS), "expected CSV, found Parquet"),
    "other.csv": (jsonl(ROWS), "expected CSV, found JSONL"),
    "rows.jsonl": (gzip.compress(jsonl(ROWS)), r"compressed by gzip; rename it to .*jsonl\.gz"),
    "plain.jsonl.gz": (jsonl(ROWS), "it is not compressed"),
    "cut.jsonl.gz": (gzip.compress(jsonl(ROWS))[:-9], "damaged gzip data"),
    "sheet.jsonl": (b"PK\x03\x04 and so on", "found a zip archive or an Excel sheet"),
    "rows.xlsx": (b"PK\x03\x04", "is an Excel sheet; write its rows as Parquet, CSV, TSV or JSONL"),
    "list.json": (b' [{"prompt": "Hi"}]', "is one JSON list"),
    "noise": (b"\x01\x00\x02", "expected JSONL, found binary data"),
    "cut.parquet": (parquet(ROWS)[:-20], "cannot be read as Parquet"),
    "columns.csv": (b"text,label\nHi,1\n", "name the column .* --prompt-column"),
    "twice.csv": (b"prompt,prompt\nHi,1\n", "the column 'prompt' is there twice"),
    "quote.csv": (b'prompt\n"Hi\n', "line 2: unexpected end of data"),
    "latin.csv": (b"prompt\n\xe9t\xe9\n", "not UTF-8"),
    "empty.csv": (b"", "is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path, name):
    content, why = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why) as failure:
        read_source(tmp_path / name)
    assert str(failure.value).startswith(str(tmp_path / name))


MIB = 2**20
BOMBS = {
    "a.jsonl.gz": (lambda: gzip.compress(b"\n" * 3 * MIB), "decompresses to more than 2097152"),
    "b.jsonl": (lambda: b" " * 3 * MIB, "has more than 2097152 bytes"),
    "-": (lambda: b"a" * 3 * MIB, "stdin: has more than 2097152 bytes"),
    "c.jsonl": (lambda: b'{"prompt": "' + b"a" * MIB, "line 1: has 1048588 bytes, and a row"),
    "d.jsonl": (lambda: b"{}\n" * 70, "has more than 64 rows"),
    "e.csv": (
        lambda: b'prompt\n"' + (b"a" * 99 + b"\n") * 999,
        "line 2: a row of more than 65536 bytes",
    ),
    "f.csv": (lambda: b"prompt\n" + b"\n" * MIB, "has more than 1024 lines"),
    "g.csv": (lambda: b"prompt\n" + b"a\n" * 70, "has more than 64 rows"),
    "h.parquet": (
        lambda: parquet([{"prompt": "x" * MIB}] * 40),
        "values take more than 2097152 bytes",
    ),
    "i.parquet": (lambda: parquet([{"prompt": "x"}] * 70), "has more than 64 rows"),
}


@pytest.mark.in_ci("h.parquet")
@pytest.mark.parametrize("name", BOMBS)
def test_what_would_fill_the_memory_is_refused(tmp_path, monkeypatch, name):
    """With limits a thousandth of the real ones."""
    for module in (read, table):
        monkeypatch.setattr(module, "MAX_INPUT_BYTES", 2 * MIB)
    limits = {"MAX_ROWS": 64, "MAX_ROW_BYTES": 2**16, "_MAX_LINES": 1024}
    for limit, value in limits.items():
        monkeypatch.setattr(table, limit, value)
    make, message = BOMBS[name]
    path = tmp_path / name
    if name == "-":
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(make())))
    else:
        path.write_bytes(make())
    with pytest.raises(DataError, match=message):
        read_source(name if name == "-" else path).check_rows()


def test_blank_lines_of_any_length_do_not_count(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n \r\n" * 1000 + b' {"prompt": "a"}\n' + b" " * MIB + b'\n{"prompt": 3}')
    source = read_source(path)
    assert [source.number(index) for index in range(len(source))] == [2001, 2003]
    assert source.row(0).raw == {"prompt": "a"}


def test_a_named_column_must_be_there(tmp_path):
    (tmp_path / "rows.csv").write_bytes(csv_text(ROWS))
    with pytest.raises(DataError, match="no column 'Question'; the nearest is 'question'"):
        read_source(tmp_path / "rows.csv", ColumnChoice(prompt="Question"))
    (tmp_path / "rows.jsonl").write_bytes(jsonl([*ROWS, {"id": "c"}]))
    row = read_source(tmp_path / "rows.jsonl", QUESTION).row(2)
    assert isinstance(row.raw, DataError)
    assert str(row.raw) == "nothing in 'question', the column of the prompts"
    assert row.row_id == "c"  # the output is joined by it


def test_a_row_with_an_empty_prompt_keeps_its_id(tmp_path):
    (tmp_path / "rows.csv").write_text("id,question\n3,Hello\nc,\n,\n")
    source = read_source(tmp_path / "rows.csv", QUESTION)
    assert [source.row(index).row_id for index in range(3)] == ["3", "c", 4]


def test_cells_of_csv(tmp_path):
    text = 'prompt,input_ids,do_sample,top_k\nx,,true,5\n,"[1, 2]",,\none,two\n'
    (tmp_path / "rows.csv").write_text(text)
    source = read_source(tmp_path / "rows.csv")
    rows = [source.row(index).raw for index in range(3)]
    assert rows[:2] == [{"prompt": "x", "do_sample": True, "top_k": 5}, {"input_ids": [1, 2]}]
    assert str(rows[2]) == "line 4: has 2 cells, but the header 4"


@pytest.mark.parametrize("module", ["pyarrow.parquet", "datasets"])
def test_missing_packages_are_named(tmp_path, monkeypatch, module):
    (tmp_path / "rows.parquet").write_bytes(parquet(ROWS))
    monkeypatch.setitem(sys.modules, module, None)
    name = tmp_path / "rows.parquet" if "." in module else "datasets:squad"
    with pytest.raises((MissingExtraError, UnsupportedError), match=r"pip install .*\["):
        read_source(name, QUESTION)


def answered(folder: Path, source: Source, output: str, *, resume: bool = False) -> bytes:
    engine: Any = RecordedEngine()
    return run(Job(engine, source, folder / output, {"--model": "m"}, resume=resume))


def read_back(path: Path) -> list[dict[str, Any]]:
    if path.name.endswith(".parquet"):
        return pq.read_table(path).to_pylist()
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if ".csv" in path.name:
        return list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.by_default("out.jsonl.gz")
@pytest.mark.parametrize(
    "output", ["out.jsonl", "out.jsonl.gz", "out.csv", "out.csv.gz", "out.parquet"]
)
def test_1000_rows_of_a_table_into_every_kind_of_output(tmp_path, output):
    rows = [{"question": f"{HAIKU} {i}", "id": f"row-{i}"} for i in range(1000)]
    (tmp_path / "rows.parquet").write_bytes(parquet(rows))
    (tmp_path / "rows.csv").write_bytes(csv_text(rows))
    expected = None
    for name in ("rows.parquet", "rows.csv"):
        source = read_source(tmp_path / name, QUESTION)
        data = answered(tmp_path, source, output)
        lines = read_back(tmp_path / output)
        assert [line["id"] for line in lines] == [row["id"] for row in rows]
        assert all(line["text"].startswith(HAIKU) for line in lines)
        assert json.loads(
            lines[7]["output_ids"] if "csv" in output else str(lines[7]["output_ids"])
        ) == [7, 2]
        assert expected in (None, data)  # the same from both
        expected = data
        (tmp_path / output).unlink()
        (tmp_path / f"{output}.report.json").unlink()


def test_a_job_over_a_table_goes_on(tmp_path):
    rows = [{"prompt": f"row {i}"} for i in range(20)]
    (tmp_path / "rows.parquet").write_bytes(parquet(rows))
    source = read_source(tmp_path / "rows.parquet")
    full = answered(tmp_path, source, "whole.parquet")
    engine: Any = RecordedEngine()
    work = Job(engine, source, tmp_path / "out.parquet", {"--model": "m"})
    with (
        contextlib.closing(CompileClock()) as clock,
        contextlib.closing(work.run(clock)) as outputs,
    ):
        for _ in range(6):
            next(outputs)
    assert answered(tmp_path, source, "out.parquet", resume=True) == full
    (tmp_path / "rows.parquet").write_bytes(parquet([*rows, {"prompt": "more"}]))
    changed = read_source(tmp_path / "rows.parquet")
    with pytest.raises(JaxLLMError, match="input: has other rows"):
        answered(tmp_path, changed, "out.parquet", resume=True)


def written_parquet(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with path.open("wb") as file:
        columns = list(dict.fromkeys(name for line in lines for name in line))
        output_writer(path)(file, OutputTable(columns, lambda: iter(lines)))
    return pq.read_table(path).to_pylist()


def test_outputs_of_several_types_and_other_names(tmp_path):
    lines = [{"id": 1, "text": "a"}, {"id": "b", "error": "wrong", "row": 2}]
    assert written_parquet(tmp_path / "out.parquet", lines) == [
        {"id": "1", "text": "a", "error": None, "row": None},
        {"id": "b", "text": None, "error": "wrong", "row": 2},
    ]
    with pytest.raises(UnsupportedError, match=r"\.xlsx files are not written, but out\.xlsx"):
        output_writer(Path("out.xlsx"))


@pytest.mark.parametrize(
    ("values", "texts"),
    [([2**70, 5], [str(2**70), "5"]), ([{"a": [{}]}, {"b": 1}], ['{"a": [{}]}', '{"b": 1}'])],
)
def test_values_that_parquet_has_no_type_for(tmp_path, values, texts):
    """Integers of more than 64 bits and objects without keys; known only after the last row."""
    written = written_parquet(tmp_path / "out.parquet", [{"id": value} for value in values])
    assert written == [{"id": text} for text in texts]
