"""Builds the input arrays of the admit program from tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxllm.batch.queue import Task
from jaxllm.batch.row_settings import Group
from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slots import Arrivals


def lay_out(tasks: Sequence[Task], group: Group, sizes: Sizes, vocab_size: int) -> Arrivals:
    """Arrays of tasks of one bucket; unused places repeat the first task."""
    count = sizes.arrivals
    filled = [*tasks, *[tasks[0]] * (count - len(tasks))]
    rows = [task.row for task in filled]
    width, encoder = tasks[0].width, {}
    if sizes.source is not None:
        mask = np.arange(width) < np.array([[len(row.ids)] for row in rows])
        encoder = {"input_ids": padded([row.ids for row in rows], width), "attention_mask": mask}
        width = 1
    arrays: dict[str, Any] = {
        "tokens": padded([row.start for row in rows], width),
        "start": np.array([len(row.start) for row in rows], np.int32),
        "draws": np.array([(t.row.seed, t.row.draw, t.sample) for t in filled], np.uint32),
    }
    return Arrivals(**arrays, settings=group.settings(rows, vocab_size), encoder=encoder)


def padded(rows: Sequence[Int[np.ndarray, " T"]], width: int) -> Int[np.ndarray, "R W"]:
    """Rows padded on the right with 0.

    >>> padded([np.array([5, 6]), np.array([7])], 3).tolist()
    [[5, 6, 0], [7, 0, 0]]
    """
    ids = np.zeros((len(rows), width), np.int32)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return ids
