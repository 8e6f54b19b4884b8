"""The sizes of a pool's programs, and rows as the arrays that they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxllm.generation.engine.queue import Task
from jaxllm.generation.engine.settings import Group
from jaxllm.generation.engine.slots import Arrivals, Texts, key_width
from jaxllm.generation.strategy import NEVER
from jaxllm.generation.values import bucket


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the shapes of a pool's programs follow from."""

    slots: int
    capacity: int
    """Columns of a slot."""
    source: int | None = None
    """Columns of the encoder's part of a slot, of an encoder-decoder."""
    shards: int = 1
    """Parts of a mesh that the slots are split over; it divides them."""

    @property
    def arrivals(self) -> int:
        """Prompts that are read in one call: a sixteenth of the slots. Decoding stops when as many
        are free, so that less than a sixteenth of the slots wait on average. Where there are so
        many that each part of a mesh can read some, all parts read as many."""
        count = max(1, self.slots // 16)
        return count - count % self.shards or count

    def with_slots(self, slots: int) -> Sizes:
        """With so many slots, or as many more as it takes to split them."""
        return dataclasses.replace(self, slots=-(-slots // self.shards) * self.shards)


def lay_out(tasks: Sequence[Task], group: Group, sizes: Sizes, vocab_size: int) -> Arrivals:
    """The arrays of some tasks of one bucket; those that are missing repeat the first."""
    count = sizes.arrivals
    filled = [*tasks, *[tasks[0]] * (count - len(tasks))]
    rows = [task.row for task in filled]
    width, encoder = tasks[0].width, {}
    if sizes.source is not None:
        mask = np.arange(width) < np.array([[len(row.ids)] for row in rows])
        encoder = {"input_ids": padded([row.ids for row in rows], width), "attention_mask": mask}
        width = 1
    start = np.array([len(row.start) for row in rows], np.int32)
    arrays: dict[str, Any] = {
        "tokens": padded([row.start for row in rows], width),
        "start": start,
        "length": start,
        "live": np.ones(count, bool),
        "stopped": np.zeros(count, bool),
        "broken_at": np.full(count, NEVER, np.int32),
        "keys": np.zeros((count, key_width()), np.uint32),
    }
    draws: Any = np.array([(t.row.seed, t.row.draw, t.sample) for t in filled], np.uint32)
    texts = Texts(**arrays, settings=group.settings(rows, vocab_size))
    return Arrivals(texts, draws, encoder)


def padded(rows: Sequence[Int[np.ndarray, " T"]], width: int) -> Int[np.ndarray, "R W"]:
    """Rows padded on the right with 0.

    >>> padded([np.array([5, 6]), np.array([7])], 3).tolist()
    [[5, 6, 0], [7, 0, 0]]
    """
    ids = np.zeros((len(rows), width), np.int32)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return ids


def size_of(tasks: Sequence[Task], slots: int, encoder_decoder: bool, shards: int) -> Sizes:
    """Sizes that hold all of some tasks."""
    capacity = max(task.capacity(encoder_decoder) for task in tasks)
    source = max(task.width for task in tasks) if encoder_decoder else None
    return Sizes(0, capacity, source, shards).with_slots(min(slots, bucket(len(tasks), 1)))
