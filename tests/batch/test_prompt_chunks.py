"""Prompts that are prefilled in chunks beside others: their logits, keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import tiny

from jaxllm.batch.prompt_chunks import (
    PromptColumns,
    StagedPrompt,
    StagedRows,
    prefill_chunk,
    staged_shapes,
    take_rows,
    zero_masked,
)
from jaxllm.batch.row_groups import Task
from jaxllm.batch.rows import RawRow, RowReader
from jaxllm.batch.slots import Sizes, empty_arrays
from jaxllm.models.decoder import FlatModel

SIZES = Sizes(32, 64, wide=32, narrow=8)
MODEL = tiny.make("mistral", num_hidden_layers=2, sliding_window=12)
PROMPTS = [np.random.default_rng(n).integers(3, 50, n).tolist() for n in (43, 13, 15)]


def staged(model: Any) -> StagedRows:
    return empty_arrays(staged_shapes(model, SIZES, None))


def chunks(
    model: Any, prompts: dict[int, list[int]], sizes: Sizes = SIZES
) -> Iterator[PromptColumns]:
    """The chunks of prompts that are staged together, by the number of their row."""
    reader = RowReader(model, None, {}, seed=0)
    tasks = {
        row: StagedPrompt(Task(reader.read(RawRow(0, 0, {"input_ids": ids})), 0), 0)
        for row, ids in prompts.items()
    }
    while tasks:
        chunk = PromptColumns.next_of(tasks, sizes)
        yield chunk
        for row, length in zip(chunk.rows.tolist(), chunk.lengths.tolist(), strict=True):
            if length:
                tasks[row].length += length
                if tasks[row].is_complete:
                    del tasks[row]


def prefilled(model: Any, rows: StagedRows, prompts: dict[int, list[int]]) -> StagedRows:
    """The rows after these prompts."""
    for chunk in chunks(model, prompts):
        rows = prefill_chunk(FlatModel.of(model), rows, chunk)
    return rows


def row_of(rows: StagedRows, row: int, length: int) -> list[np.ndarray]:
    """Logits, keys and values of a prompt."""
    cache = rows.cache.truncate(np.full(2, length, np.int32))  # pyright: ignore[reportArgumentType]
    own = take_rows(zero_masked(cache), 2, np.array([row]))  # pyright: ignore[reportArgumentType]
    return [np.asarray(x) for x in (rows.logits[row], *jax.tree.leaves(own.layers))]


def test_neighbours_change_no_bit_of_a_prompt():
    first, _, last = PROMPTS
    alone = row_of(prefilled(MODEL, staged(MODEL), {0: first}), 0, len(first))
    for prompts in ({0: first, 1: last}, {1: last, 0: first}):
        beside = row_of(prefilled(MODEL, staged(MODEL), prompts), 0, len(first))
        for x, y in zip(alone, beside, strict=True):
            np.testing.assert_array_equal(x, y)


def test_logits_are_those_of_the_whole_prompt():
    rows = prefilled(MODEL, staged(MODEL), {0: PROMPTS[0], 1: PROMPTS[1]})
    for row, prompt in enumerate(PROMPTS[:2]):
        whole = tiny.logits(MODEL, np.array([prompt]))[0, -1]
        np.testing.assert_allclose(rows.logits[row], whole, atol=1e-5)


def test_a_new_prompt_sees_nothing_of_the_last_one_in_its_row():
    second, old = PROMPTS[1], staged(MODEL)
    fresh = row_of(prefilled(MODEL, staged(MODEL), {1: second}), 1, len(second))
    nan = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), old.cache.layers)
    old = StagedRows(old.cache.replace(layers=nan), old.logits)
    for x, y in zip(fresh, row_of(prefilled(MODEL, old, {1: second}), 1, 13), strict=True):
        np.testing.assert_array_equal(x, y)


def test_prompts_are_cut_where_they_are_cut_alone():
    cuts: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks(MODEL, {1: PROMPTS[1], 0: PROMPTS[0]}):
        for row, start, length in zip(chunk.rows, chunk.starts, chunk.lengths, strict=True):
            if length:
                cuts[int(row)].append(int(start + length))
    assert cuts == {0: [32, 40, 43], 1: [8, 13]}


def test_devices_that_share_the_rows_have_a_part_of_a_wide_chunk_each():
    prompts = {0: PROMPTS[0], 1: PROMPTS[0][::-1]}
    (first, *_), together = chunks(MODEL, prompts), dataclasses.replace(SIZES, shards=2)
    assert first.tokens.shape == (1, 32)
    found = list(chunks(MODEL, prompts, together))
    assert [chunk.tokens.shape for chunk in found] == [(2, 32), (2, 8), (2, 8)]
    assert [chunk.lengths.tolist() for chunk in found] == [[32, 32], [8, 8], [3, 3]]
