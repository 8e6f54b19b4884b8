"""Sources of rows: what is read, and what is refused with its place."""

from __future__ import annotations

import gzip
import hashlib
import sys

import pyarrow
import pyarrow.parquet as pq
import pytest

from jaxllm.common.errors import DataError, MissingExtraError, MissingFileError
from jaxllm.training.data.rows import SequenceRows, dataset_rows, open_rows


def write(folder, name: str, data: bytes | str):
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_jsonl_rows_by_index(tmp_path):
    """A BOM, blank lines, CRLF and a missing line break at the end change nothing."""
    text = '\ufeff{"a": 1}\r\n\n   \n{"a": "\u2028é"}\n{"a": 3}'
    path = write(tmp_path, "x.jsonl", text)
    rows = open_rows(str(path))
    assert [rows[n]["a"] for n in (2, 0, 1)] == [3, 1, "\u2028é"]
    assert len(rows) == 3
    assert [rows.where(n) for n in range(3)] == [f"{path}:1", f"{path}:4", f"{path}:5"]


def test_files_by_glob_list_and_folder(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        text = f'{{"name": "{name}"}}'
        write(tmp_path, name, text if name.endswith("l") else f"[{text}]")
    rows = open_rows(f"{tmp_path}/*.jsonl")
    assert [rows[n]["name"] for n in range(2)] == ["a.jsonl", "b.jsonl"]
    listed = open_rows([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])
    assert [listed[n]["name"] for n in range(2)] == ["b.jsonl", "a.jsonl"]
    assert listed.where(1) == f"{tmp_path}/a.jsonl:1"
    assert open_rows(tmp_path / "c.json")[0]["name"] == "c.json"
    with pytest.raises(DataError, match=r"b\.jsonl is named twice"):
        open_rows([f"{tmp_path}/*.jsonl", f"{tmp_path}/b.jsonl"])
    with pytest.raises(DataError, match="expected files of one type, found json, jsonl"):
        open_rows(f"{tmp_path}/*")
    with pytest.raises(DataError, match=r"cannot be read \(File name too long"):
        open_rows(tmp_path / ("x" * 300))
    with pytest.raises(DataError, match="a folder"):
        open_rows(tmp_path)
    with pytest.raises(MissingFileError, match=r"z\*\.jsonl"):
        open_rows(f"{tmp_path}/z*.jsonl")
    with pytest.raises(DataError, match="empty"):
        open_rows([])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"a": 1} {"a": 2}', "not JSON"),
        ('{"a": NaN}', "not finite"),
        ('{"a": 1, "a": 2}', "appears twice"),
        ('["a"]', "expected an object, found a list"),
        ("null", "expected an object, found null"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": "\\ud800"}', "unpaired surrogate"),
        (b"\x00", "not JSON"),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, "bad.jsonl", b'{"a": 0}\n\n' + line + b"\n")
    rows = open_rows(path)
    assert rows[0] == {"a": 0}
    with pytest.raises(DataError, match=message) as caught:
        rows[1]
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": 2}', "not JSON"),
        ('{"a": 1}', "an object, not a list of objects; .* 'jsonl'"),
        ('[{"a": 1}, 2]', r"bad\.json\[1\]: expected an object, found int"),
    ],
)
def test_bad_json_files(tmp_path, text, message):
    path = write(tmp_path, "bad.json", text)
    with pytest.raises(DataError, match=message):
        open_rows(path)


def test_text_and_bytes(tmp_path):
    path = write(tmp_path, "x.txt", "\ufeffone\n\n two \r\n")
    assert open_rows(path)[0] == {"text": "one\n\n two \r\n"}
    lines = open_rows(path, by_line=True)
    assert [lines[n]["text"] for n in range(len(lines))] == ["one", " two "]
    binary = write(tmp_path, "x.bin", b"\xff\x00")
    assert open_rows(binary)[0] == {"text": b"\xff\x00"}
    with pytest.raises(DataError, match=r"x\.bin: not UTF-8 \(byte 0\)"):
        open_rows(binary, file_type="text")[0]
    with pytest.raises(DataError, match="set file_type"):
        open_rows(write(tmp_path, "x.weights", b""))
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_rows(write(tmp_path, "x.parquet", b""))


def test_tables(tmp_path):
    """Several files of one type; cells of CSV are texts."""
    chat = '"[{""role"": ""user"", ""content"": ""Hi""}]"'
    write(tmp_path, "a.csv", "question,n,messages\nWhy?,1,\n")
    write(tmp_path, "b.csv", f'question,n,messages\n"two\nlines",2,{chat}\n')
    rows = open_rows(str(tmp_path / "*.csv"))
    assert [rows[i] for i in range(len(rows))] == [
        {"question": "Why?", "n": "1", "messages": ""},
        {"question": "two\nlines", "n": "2", "messages": chat[1:-1].replace('""', '"')},
    ]
    assert [rows.where(i) for i in (0, 1)] == [f"{tmp_path}/{name}.csv:2" for name in "ab"]
    table = pyarrow.table({"question": ["Why?", None], "n": [1, 2]})
    pq.write_table(table, tmp_path / "c.parquet")
    rows = open_rows(tmp_path / "c.parquet")
    assert rows[1] == {"question": None, "n": 2}
    assert rows.where(1) == f"{tmp_path}/c.parquet[1]"
    compressed = gzip.compress(b"question\tn\nWhy?\t1\n")
    assert open_rows(write(tmp_path, "d.tsv.gz", compressed))[0] == {"question": "Why?", "n": "1"}
    with pytest.raises(DataError, match="and tables also with"):
        open_rows(write(tmp_path, "e.jsonl.gz", compressed))
    with pytest.raises(DataError, match=r"f\.csv:3: has 1 cells, but the header 2"):
        open_rows(write(tmp_path, "f.csv", "a,b\n1,2\n3\n"))[1]


def test_hashes(tmp_path):
    contents = [b'{"a": 1}\n', b'{"a": 2}\n']
    paths = [write(tmp_path, f"{n}.jsonl", data) for n, data in enumerate(contents)]
    assert open_rows(paths[0]).sha256() == hashlib.sha256(contents[0]).hexdigest()
    assert open_rows(paths).sha256() == hashlib.sha256(b"".join(contents)).hexdigest()
    hashes = {SequenceRows(rows).sha256() for rows in ([{"a": 1}], [{"a": 2}], [])}
    assert len(hashes) == 3
    assert SequenceRows([{"a": 1, "b": 2}]).sha256() == SequenceRows([{"b": 2, "a": 1}]).sha256()


def test_sequence_rows_are_checked():
    rows = SequenceRows([{"a": 1}, "text"])  # type: ignore[list-item]
    assert rows[0] == {"a": 1}
    with pytest.raises(DataError, match=r"rows\[1\]: expected an object, found a string"):
        rows[1]


def test_datasets_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install .*\[datasets\]"):
        dataset_rows("some/name")
