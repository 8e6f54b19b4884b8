"""Streamed data sets: every row once an epoch, the batches of a set in memory, and exact resume."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from test_batches import BYTES, CAUSAL, ROWS, SETUPS, documents, same

from jaxllm.common.errors import DataError
from jaxllm.common.progress import set_progress
from jaxllm.training.data import DataConfig, Peers, epoch_batches, large_files, make_batches, stream
from jaxllm.training.data.rows import open_rows

PAIRS = [
    {"prompt": f"{n}?", "chosen": "yes" * (n % 3 + 1), "rejected": "no"}
    if n % 5
    else {"prompt": f"{n}?", "chosen": "no", "rejected": "no"}
    for n in range(53)
]
STREAMED = {
    name: (replace(config, streaming=True), model) for name, (config, model) in SETUPS.items()
}
STREAMED["pairs"] = (DataConfig(format="preference", streaming=True), CAUSAL)
STREAMED["dropped"] = (
    DataConfig(format="text", streaming=True, max_length=20, on_too_long="drop"),
    CAUSAL,
)
STREAMED["split"] = (
    DataConfig(format="text", streaming=True, max_length=20, on_too_long="split", packing=True),
    CAUSAL,
)
each_setup = pytest.mark.parametrize("name", STREAMED)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """Windows of some rows: 53 rows are several windows."""
    monkeypatch.setattr(stream, "WINDOW_BATCHES", 1)
    monkeypatch.setattr(stream, "WINDOW_ROWS", 16)


def batches_of(name: str, batch_size: int = 4, make=make_batches, **options):
    config, model = STREAMED[name]
    rows = PAIRS if name == "pairs" else ROWS
    options = {"rows": rows, **options}
    return make(config, BYTES, model=model, batch_size=batch_size, **options)


def contents(batch: dict) -> list[tuple]:
    """Every example of a batch of any format, in the order of its rows."""
    mask = batch.get("segment_ids", batch.get("attention_mask"))
    found = []
    for row in range(len(mask)):
        if mask.ndim == 3:
            if mask[row].any():
                found.append(tuple(batch["input_ids"][row][mask[row] > 0].tolist()))
            continue
        for number in range(1, mask[row].max() + 1):
            found.append(tuple(batch["input_ids"][row][mask[row] == number].tolist()))
    return found


def expected_contents(name: str) -> list[tuple]:
    """The examples of the rows, encoded one by one."""
    encoder = batches_of(name).examples.encoder
    items = [item for row in range(len(encoder.rows)) for item in encoder(row)[0]]
    return [
        tuple(t for sequence in item.sequences for t in sequence.input_ids.tolist())
        for item in items
    ]


@pytest.mark.by_default("packed", "pairs")
@each_setup
def test_every_row_once_in_every_epoch(name):
    batches = batches_of(name, epochs=3)
    assert batches.examples.windows > 1
    epochs: list[list[tuple]] = [[], [], []]
    for batch in batches:
        epochs[batches.epoch] += contents(batch)
    expected = expected_contents(name)
    assert [sorted(epoch) for epoch in epochs] == [sorted(expected)] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    in_order = batches_of(name, make=epoch_batches)
    evaluated = [x for batch in in_order for x in contents(batch)]
    assert in_order
    for ask in (len, lambda x: x[0], lambda x: x.padding, lambda x: x.members):
        with pytest.raises(TypeError, match="not known before it is read; iterate"):
            ask(in_order)
    assert sorted(evaluated) == sorted(expected)


@pytest.mark.by_default("dropped", "split")
@each_setup
def test_at_most_one_batch_of_an_epoch_is_not_full(name):
    """Where rows are dropped, or packed, a window has not a multiple of the rows of a batch."""
    batches = batches_of(name, epochs=2)
    assert batches.examples.windows > 1
    not_full, carried = [0, 0], 0
    for batch in batches:
        mask = batch.get("segment_ids", batch.get("attention_mask"))
        not_full[batches.epoch] += not mask.reshape(len(mask), -1).any(axis=1).all()
        carried += len(batches.carried)
    assert max(not_full) <= 1
    assert (carried > 0) == (name in ("packed", "packed pairs", "pairs", "dropped", "split"))


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_those_of_rows_in_memory_in_the_same_order(shuffle):
    """Where no row is dropped, and all batches have one length."""
    config = DataConfig(format="text", bucket=None, shuffle=shuffle, streaming=True)
    streamed = make_batches(config, BYTES, model=CAUSAL, batch_size=4, rows=ROWS, epochs=1)
    source = streamed.examples
    order = [row for window in range(source.windows) for row in source.order(0, window)]
    assert sorted(order) == list(range(len(ROWS)))
    assert (order == sorted(order)) is not shuffle
    rows = [ROWS[row] for row in order]
    kept = replace(config, streaming=False, shuffle=False)
    in_memory = make_batches(kept, BYTES, model=CAUSAL, batch_size=4, rows=rows, epochs=1)
    if not shuffle:
        assert all(same(a, b) for a, b in zip(streamed, in_memory, strict=True))
        return
    # The batches of a window come in a new order.
    found, expected = ([documents("text", batch) for batch in x] for x in (streamed, in_memory))
    per_window = source.window_rows // 4
    for n in range(0, len(expected), per_window):
        a, b = (itertools.chain(*x[n : n + per_window]) for x in (found, expected))
        assert sorted(a) == sorted(b)


@pytest.mark.by_default("packed pairs")
@pytest.mark.parametrize("name", SETUPS)
def test_one_window_is_what_is_kept_in_memory(name, monkeypatch):
    """The same plan, in the order of the rows."""
    monkeypatch.setattr(stream, "WINDOW_ROWS", 100)
    streamed = batches_of(name, make=epoch_batches)
    config, model = SETUPS[name]
    kept = epoch_batches(config, BYTES, model=model, batch_size=4, rows=ROWS)
    assert all(same(a, b) for a, b in zip(streamed, kept, strict=True))


@pytest.mark.by_default("split")
@each_setup
def test_a_restored_position_goes_on_exactly(name):
    """At any step of two epochs."""
    straight = batches_of(name, epochs=2)
    states, every = [straight.state()], []
    for batch in straight:
        every.append(batch)
        states.append(straight.state())
    assert {state["window"] for state in states} == set(range(straight.examples.windows))
    for step in range(0, len(every), 5):
        again = batches_of(name, epochs=2)
        again.restore(json.loads(json.dumps(states[step])))
        assert again.state() == states[step]
        for batch, expected in zip(again, every[step:], strict=True):
            assert same(batch, expected)


class Together:
    """Gathers between threads that stand for processes."""

    def __init__(self, count: int) -> None:
        self.count, self.parts = count, [None] * count
        self.barrier = threading.Barrier(count)

    def peers(self, index: int) -> Peers:
        def gather(act):
            self.parts[index] = act()
            self.barrier.wait(20)
            result = list(self.parts)
            self.barrier.wait(20)
            return result

        return Peers(index, self.count, gather)


@pytest.mark.by_default("split")
@each_setup
def test_processes_share_the_encoding_and_resume_in_another_number(name):
    """Two processes read what one does, and each encodes its own share of the rows."""
    alone = batches_of(name, epochs=2)
    states = [alone.state() for _ in alone]
    steps = next((n for n, each in enumerate(states, 1) if each["carried"]), 3)
    expected, state = list(batches_of(name, epochs=2)), states[steps - 1]
    together = Together(2)

    def work(index: int):
        options = {"process_index": index, "process_count": 2, "peers": together.peers(index)}
        batches = batches_of(name, epochs=2, **options)
        encoded: list[int] = []
        encoder = batches.examples.encoder
        spy = replace(encoder, rows=Spy(encoder.rows, encoded))
        batches = batches.with_examples(replace(batches.examples, encoder=spy))
        some = [next(batches) for _ in range(steps)]
        one_window = len(encoded)
        mine = [*some, *batches]
        again = batches_of(name, epochs=2, **options)
        again.restore(state)
        resumed = list(again)
        assert all(same(a, b) for a, b in zip(resumed, mine[steps:], strict=True))
        return mine, one_window, len(encoded)

    with ThreadPoolExecutor(2) as threads:
        (first, *_), (second, *_) = results = list(threads.map(work, range(2)))
    for a, b, batch in zip(first, second, expected, strict=True):
        assert same({key: np.concatenate([a[key], b[key]]) for key in batch}, batch)
    # Half of the rows for their lengths, and a part of the other half for the batches.
    assert all(53 <= count <= 2 * 53 + 14 for *_, count in results), [r[1:] for r in results]


class Spy:
    """Rows that record which of them are read."""

    def __init__(self, rows, seen: list[int]) -> None:
        self.rows, self.seen = rows, seen
        self.name, self.where, self.size = rows.name, rows.where, rows.size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int):
        self.seen.append(index)
        return self.rows[index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [*ROWS[:-1], {"text": "other"}]}, "examples was '[0-9a-f]+' and is now"),
        ({"batch_size": 2}, "batch_size was 4 and is now 2"),
        ({"config": DataConfig(format="text", packing=True)}, "were streamed .*streaming to true"),
        ({"config": DataConfig(format="text", max_length=45, streaming=True)}, "examples was"),
    ],
)
def test_state_of_another_run_is_refused(change, message):
    state = batches_of("text").state()
    arguments = {"config": STREAMED["text"][0], "rows": ROWS, "batch_size": 4, **change}
    other = make_batches(arguments.pop("config"), BYTES, model=CAUSAL, **arguments)
    with pytest.raises(DataError, match=message):
        other.restore(state)
    with pytest.raises(DataError, match="window 9, but an epoch has 4; resume from another"):
        batches_of("text").restore({**state, "window": 9})
    with pytest.raises(DataError, match="batch 99 of epoch 0, which has 4"):
        batches_of("text").restore({**state, "batch": 99})
    not_sizes = ({}, [[1, 0]], [[53, 0, 1]], [[1, 0, 1.0]])
    for carried in (*not_sizes, [[10, 0, 9999]], [[0, 0, 3]] * 3):
        message = r"carried is .*, not places of distinct examples .*; resume from another"
        with pytest.raises(DataError, match=message):
            batches_of("text").restore({**state, "carried": carried})
    del state["carried"]
    with pytest.raises(DataError, match=r"'carried' is missing, .* earlier version .* anew"):
        batches_of("text").restore(state)


@pytest.mark.parametrize("carried", [[0, 5, 3], [0, 0, 3]])
def test_a_carried_example_that_its_row_lacks(carried):
    """The row has no such piece, or the piece has another length."""
    batches = batches_of("text")
    batches.restore({**batches.state(), "carried": [carried]})
    message = rf"rows\[0\]: .* \[3\] tokens in piece {carried[1]} .*; resume from another"
    with pytest.raises(DataError, match=message):
        list(itertools.islice(batches, 4))


def test_counts_and_steps_are_estimated():
    batches = batches_of("text", epochs=1)
    assert (
        batches.counts
        == make_batches(SETUPS["text"][0], BYTES, model=CAUSAL, batch_size=4, rows=ROWS).counts
    )  # the sample has all rows
    assert "streamed, about 53 examples of 53 rows" in batches.summary
    assert "estimated from 53 rows, the longest of" in batches.summary
    steps = batches.batches_per_epoch
    assert steps == len(list(batches)) == 14
    packed = batches_of("split", epochs=1)
    assert packed.batches_per_epoch == pytest.approx(len(list(packed)), abs=3)


def test_a_bad_row_is_named_when_it_is_met(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    lines[40] = "{"
    path.write_text("\n\n".join(lines))
    monkeypatch.setattr(stream, "SAMPLE_ROWS", 5)
    config = replace(STREAMED["text"][0], path=str(path), shuffle=False)
    batches = make_batches(config, BYTES, model=CAUSAL, batch_size=4)
    assert len([next(batches) for _ in range(8)]) == 8
    for _ in range(2):  # the error stays
        with pytest.raises(DataError, match=r"x\.jsonl:81: not JSON"):
            list(batches)
    all_dropped = replace(STREAMED["dropped"][0], max_length=2)
    with pytest.raises(DataError, match="rows: nothing to learn from in a sample: 0 examples"):
        make_batches(all_dropped, BYTES, model=CAUSAL, batch_size=4, rows=ROWS)


def test_windows_without_examples(monkeypatch):
    """All rows of some windows are dropped; those of all windows are an error."""
    rows = [{"text": "a" if n in (0, 52) else "a" * 40} for n in range(53)]
    config = replace(STREAMED["dropped"][0], shuffle=False)
    monkeypatch.setattr(stream, "window_rows", lambda *_: 16)
    batches = make_batches(config, BYTES, model=CAUSAL, batch_size=4, rows=rows, epochs=2)
    assert [len(documents("text", batch)) for batch in batches] == [2, 2]
    batches = make_batches(config, BYTES, model=CAUSAL, batch_size=4, rows=rows)
    rows[:] = [{"text": "a" * 40}] * 53
    with pytest.raises(DataError, match="4 windows in a row have no examples"):
        next(batches)


@pytest.fixture
def all_large(monkeypatch, tmp_path):
    """Every file counts as large, and its index is kept in a folder of the test."""
    monkeypatch.setattr(large_files, "LARGE_BYTES", 0)
    monkeypatch.setattr(large_files, "_BLOCK", 32)
    monkeypatch.setattr(large_files, "BATCH_ROWS", 4)
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def test_large_files_stream_by_default(all_large, tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(stream, "LARGE_BYTES", 0)
    config = replace(SETUPS["text"][0], path=str(path))
    batches = make_batches(config, BYTES, model=CAUSAL, batch_size=4)
    assert batches.examples.windows == 4
    state = batches.state()
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS[1:], ROWS[0]]))
    with pytest.raises(DataError, match="examples was"):
        make_batches(config, BYTES, model=CAUSAL, batch_size=4).restore(state)
    assert len(list(all_large.glob("*/rows-*"))) == 1  # the old index is gone
    monkeypatch.setattr(stream, "WINDOW_ROWS", 60)  # one window has all rows: they are kept
    assert make_batches(config, BYTES, model=CAUSAL, batch_size=4).counts.rows == 53


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n{"a": 2}',
        '\ufeff{"a": 1}\r\n\n   \n{"a": "\u2028é"}\n  {"a": 3}\n\n',
        "\ufeff\n\n",
        "",
        "\n".join('{"a": "%s"}' % ("x" * n) for n in range(70)),
    ],
)
def test_kept_indexes_of_lines(text, tmp_path, monkeypatch, request):
    path = tmp_path / "x.jsonl"
    path.write_bytes(text.encode())
    small = open_rows(path)
    request.getfixturevalue("all_large")
    if text:
        for _ in range(2):  # built, and read again
            large = open_rows(path)
            assert [large[n] for n in range(len(large))] == [small[n] for n in range(len(small))]
            places = [[rows.where(n) for n in range(len(rows))] for rows in (small, large)]
            assert places[0] == places[1]
            assert large.digest() == small.digest() == small.sha256()


def test_copied_tables(tmp_path, all_large, monkeypatch):
    """Rows, places and errors are those of tables in memory."""
    cells = [f'{n},"two\n""lines""",é{n}\r\n' for n in range(11)]
    (tmp_path / "a.csv").write_bytes(("\ufeffn,text,more\n" + "".join(cells)).encode())
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"n\ttext\n" + b"1\tx\n" * 9))
    n = np.arange(11)
    table = pyarrow.table(
        {
            "n": n,
            "gaps": pyarrow.array([float(x) if x % 3 else None for x in n]),
            "nan": [float(x) if x % 3 else float("nan") for x in n],
            "float": n / 2,
            "kind": pyarrow.array([f"k{x % 2}" for x in n]).dictionary_encode(),
            "messages": [[{"role": "user", "content": str(x), "name": None}] for x in n],
        }
    )
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=3)
    for name in ("a.csv", "b.tsv.gz", "c.parquet"):
        large = open_rows(tmp_path / name)
        monkeypatch.setattr(large_files, "LARGE_BYTES", 1 << 30)
        small = open_rows(tmp_path / name)
        monkeypatch.setattr(large_files, "LARGE_BYTES", 0)
        assert len(large) == len(small) > 8
        assert [large[i] for i in range(len(large))] == [small[i] for i in range(len(small))]
        assert [large.where(i) for i in range(len(large))] == [
            small.where(i) for i in range(len(small))
        ]
    (tmp_path / "d.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(DataError, match=r"d\.csv:3: has 1 cells, but the header 2"):
        open_rows(tmp_path / "d.csv")
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"e\.parquet: cannot be read as Parquet"):
        open_rows(tmp_path / "e.parquet")
    (tmp_path / "f.csv").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match="expected CSV, found JSONL"):
        open_rows(tmp_path / "f.csv")
    (tmp_path / "g.csv").write_text("n,n\n1,2\n")
    with pytest.raises(DataError, match="the column 'n' is there twice"):
        open_rows(tmp_path / "g.csv")
    assert len(list(all_large.glob("*/*-*"))) == 2  # nothing of the files with errors


def test_building_an_index_shows_its_progress(all_large, tmp_path, capsys):
    """Bytes and their speed, where progress is on."""

    def build(name: str) -> str:
        path = tmp_path / name
        (path / "x.jsonl").parent.mkdir()
        (path / "x.jsonl").write_text('{"text": "a"}\n')
        (path / "x.csv").write_text("text\na\n")
        pq.write_table(pyarrow.table({"text": ["a"]}), path / "x.parquet")
        for file in path.iterdir():
            open_rows(file).digest()
        return capsys.readouterr().err

    assert build("off") == ""
    set_progress(True, least_seconds=0)
    try:
        lines = [line.split(f" {tmp_path}/on/") for line in sorted(build("on").splitlines())]
    finally:
        set_progress(False)
    files = ("x.csv", "x.jsonl", "x.parquet")
    works = [("copying", files[2:]), ("hashing", files), ("indexing", files[:2])]
    expected = [[work, file] for work, names in works for file in names]
    assert [[work, line.split(":")[0]] for work, line in lines] == expected
    assert all(re.search(r": \d\.\d s, [\d,]+ MB/s$", line) for _, line in lines)


def test_a_cache_folder_that_cannot_be_written(all_large, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    all_large.parent.write_text("a file")
    with pytest.raises(DataError, match="cannot be written"):
        open_rows(tmp_path / "x.jsonl")
