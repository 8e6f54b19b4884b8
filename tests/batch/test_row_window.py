"""Rows that are read while others run: windows, what waits in them, and the pools of a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxllm import BatchGenerator
from jaxllm.batch import row_window
from jaxllm.batch.row_window import RowWindow
from jaxllm.batch.rows import RawRow
from jaxllm.batch.slot_pool import SlotPool
from jaxllm.batch.task_run import TaskRun

MODEL = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=256)
SIZE = 16
"""Rows of a window."""


@pytest.fixture(autouse=True)
def small_window(monkeypatch):
    monkeypatch.setattr(row_window, "WINDOW", SIZE)


def row(index: int, length: int = 8, new: int = 6) -> dict[str, Any]:
    rng = np.random.default_rng(index)
    return {"input_ids": rng.integers(3, 50, length).tolist(), "max_new_tokens": new}


def counted(rows: Iterable[Any], read: list[int]) -> Iterator[Any]:
    """Rows whose numbers are noted when they are read."""
    for index, each in enumerate(rows):
        read.append(index)
        yield each


def test_an_endless_iterator_yields_results_in_windows():
    read: list[int] = []
    engine = BatchGenerator(MODEL, slots=2, eos_token_id=None)
    started: dict[int, int] = {}
    for output in engine.stream(counted(map(row, itertools.count()), read)):
        assert output.error is None
        started[output.index] = len(read)
        if len(started) == 80:
            break
    assert min(started.values()) <= SIZE + 4  # the first results, with two rows in slots
    # A row is in a slot at the latest when the window's end is a window further.
    assert all(read_then - index <= SIZE + 8 for index, read_then in started.items())
    assert len(engine.memory) == 1


def mixed_rows() -> list[Any]:
    """Rows of several groups, lengths and tasks in every window, wrong ones among them."""
    rows: list[Any] = [row(i, 3 + i % 14, 2 + i % 7) for i in range(90)]
    for i in range(0, 90, 9):
        rows[i] |= {"do_sample": True, "temperature": 0.5 + i / 90, "num_return_sequences": 2}
    for i in range(4, 90, 10):
        rows[i] |= {"num_beams": 2}
    for i in range(5, 90, 15):
        rows[i] |= {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}
    for i in range(50, 90, 8):
        rows[i] |= {"suppress_tokens": [9, 10]}
    rows[7], rows[70] = {"prompt": "no tokenizer"}, {"input_ids": []}
    rows[80] = row(80, 100, 90)
    return rows


@pytest.mark.ci
def test_results_do_not_depend_on_the_window(monkeypatch):
    rows, read = mixed_rows(), []
    small = BatchGenerator(MODEL, slots=4).generate(counted(rows, read))
    assert read == list(range(len(rows)))
    monkeypatch.setattr(row_window, "WINDOW", 1000)
    assert small == BatchGenerator(MODEL, slots=4).generate(rows)
    assert [output.index for output in small if output.error] == [7, 70]


def programs(rows: list[Any]) -> tuple[list[str], BatchGenerator]:
    engine = BatchGenerator(MODEL, slots=4, eos_token_id=None)
    engine.generate(rows)
    assert engine.counts.programs == len(engine.counts.program_calls)
    return sorted(engine.counts.program_calls), engine


@pytest.mark.ci
def test_longer_rows_need_a_pool_more(monkeypatch):
    short = [row(i, 4 + i % 20, 6) for i in range(40)]
    longer = [row(i, 4 + i * 7 % 40, 60) for i in range(40)]
    in_windows, engine = programs([*short, *longer])
    assert engine.counts.rows_read == 80
    assert [memory.capacity for memory in engine.memory] == [32, 128]
    same, _ = programs([*longer, *short])
    monkeypatch.setattr(row_window, "WINDOW", 1000)
    at_once, _ = programs([*short, *longer])
    assert same == at_once
    assert len(in_windows) == len(at_once) + 3  # which decodes, reads chunks, and starts rows


@pytest.mark.ci
def test_a_row_waits_for_the_first_pool_that_holds_it():
    """Also where memory has room for a single slot of the longest rows: others stay out of it."""
    model = tiny.make("llama", num_hidden_layers=1, max_position_embeddings=4096)
    short = [row(i, 3, 20) for i in range(30)]
    small = BatchGenerator(model, slots=8)
    small.generate(short[:10])
    memory = small.memory[0].total + 3 * 10**6
    long = row(0, 100, 3900) | {"eos_token_id": list(range(50))}
    middle = row(1, 3, 300) | {"eos_token_id": list(range(50))}
    engine = BatchGenerator(model, slots=8, memory=memory)
    rows = [*short[:10], long, *short, middle, *short, long]
    outputs = engine.generate(rows)
    assert all(output.error is None for output in outputs)
    found = [(each.capacity, each.slots) for each in engine.memory]
    assert [capacity for capacity, _ in found] == [4096, 32, 512]
    assert found[0][1] < found[2][1] <= found[1][1] == 8


def test_static_rows_run_in_windows():
    fields = {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}
    read: list[int] = []
    rows = counted((row(i) | fields for i in itertools.count()), read)
    outputs = BatchGenerator(MODEL, slots=4).stream(rows)
    assert [output.index // SIZE for output in itertools.islice(outputs, 40)] == (
        [0] * SIZE + [1] * SIZE + [2] * 8
    )
    assert len(read) == 3 * SIZE


def test_wrong_rows_come_at_once():
    engine = BatchGenerator(MODEL, slots=2)
    outputs = engine.answer(RawRow(i, i, {"prompt": "x"}) for i in itertools.count())
    assert [output.index for output in itertools.islice(outputs, 3)] == [0, 1, 2]
    assert engine.counts.rows_read == 3


def test_a_row_waits_until_its_last_sample_is_taken():
    """Otherwise longer rows would be read without end, and go first; the same after a failure."""
    several = {"do_sample": True, "num_return_sequences": 3}
    rows = (row(i, new=6) if i else row(i, new=2) | several for i in itertools.count())
    engine = BatchGenerator(MODEL, slots=2)
    checked = engine._checked(RawRow(i, i, each) for i, each in enumerate(rows))
    window = RowWindow(checked, False, 1, engine.counts)
    list(window.read())
    engine._add_pools(window)
    (pool,) = window.pools
    tasks = window.take(pool, SIZE)
    assert [task.row.index for task in tasks] == [*range(1, SIZE), 0]
    list(window.read())
    assert engine.counts.rows_read == SIZE
    assert [task.sample for task in window.take(pool, 2)] == [1, 2]
    assert not window.is_full
    window.put_back(pool, tasks)
    list(window.read())
    assert engine.counts.rows_read == SIZE + 1  # row 1 is the oldest one now


def test_a_sample_that_runs_again_keeps_no_window(monkeypatch):
    """A row whose last sample has ended before another one of it runs again."""
    several = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 30, "seed": 1}
    ends = {"eos_token_id": [5, 9, 11, 13, 20, 21, 22, 23]}
    rows = [row(0) | several | ends, *(row(i, new=40) for i in range(1, 60))]
    read, calls, again = SlotPool.read, itertools.count(), []

    def run_out(self, window):
        samples = [task.sample for task in self.tasks if task is not None and not task.row.index]
        if not again and samples == [1]:
            again.append(next(calls))
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return read(self, window)

    monkeypatch.setattr(SlotPool, "read", run_out)
    engine = BatchGenerator(MODEL, slots=4)
    outputs = engine.generate(rows)
    assert [output.index for output in outputs] == list(range(60))
    assert (engine.counts.halvings, [output.error for output in outputs]) == (1, [None] * 60)


def test_a_resumed_job_chooses_the_pools_of_the_first_run(monkeypatch):
    """Also those that were not chosen before it stopped: its window has the same rows."""
    monkeypatch.setattr(row_window, "WINDOW", 8)
    lengths = [6 if i < 12 or i % 2 else (40 if i < 20 else 200) for i in range(40)]
    rows = [RawRow(i, i, row(i, length, 8)) for i, length in enumerate(lengths)]

    def run(missing, kept):
        engine, saved = BatchGenerator(MODEL, slots=4, eos_token_id=None), dict(kept)
        engine.keep_pools(kept, saved.update, rows.__getitem__)
        return saved, engine.answer(rows[i] for i in missing)

    saved, outputs = run(range(40), {})
    list(outputs)
    stopped, outputs = run(range(40), {})
    done = {output.index for output in itertools.islice(outputs, 16)}
    assert len(stopped["pools"]) < len(saved["pools"])
    resumed, outputs = run([i for i in range(40) if i not in done], stopped)
    list(outputs)
    assert resumed["pools"] == saved["pools"]


def test_finished_rows_do_not_wait_for_the_next_ones(monkeypatch):
    read, held = RowWindow.read, []

    def noted(self, *enough):
        run = getattr(enough[0], "__self__", None) if enough else None
        if isinstance(run, TaskRun):  # it needs more rows, which may be slow to come
            held.append(len(run._finished))
        yield from read(self, *enough)

    monkeypatch.setattr(RowWindow, "read", noted)
    outputs = BatchGenerator(MODEL, slots=4).generate([row(i, new=4) for i in range(3 * SIZE)])
    assert len(outputs) == 3 * SIZE
    assert set(held) == {0}
