"""Continuous batching, host side: refills slots and collects finished sequences.

The host works ahead: while the device decodes, it lays out the next prompts and yields finished
sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.arrivals import lay_out
from jaxllm.batch.counts import Counts
from jaxllm.batch.programs import Seen, admit_program, decode_program
from jaxllm.batch.queue import Queue, Task
from jaxllm.batch.results import Done, not_finite
from jaxllm.batch.row_settings import Group
from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import empty_slots, slot_shapes
from jaxllm.batch.slots import Arrivals, SlotOutputs
from jaxllm.generation.strategies.strategy import NEVER
from jaxllm.parallel.sharding import use

MOST_STEPS = 256
"""Maximum number of decode steps per call, so that progress is reported."""


@dataclasses.dataclass(frozen=True)
class _Ready:
    """Tasks and their arrays for `admit`."""

    tasks: list[Task]
    arrivals: Arrivals


class Pool:
    """Runs the tasks of one group in one set of slots.

    Args:
        model: without metadata that only the host reads (`without_metadata`).
        tasks: must all fit `sizes`.
        mesh: the model's mesh.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        group: Group,
        tasks: Sequence[Task],
        sizes: Sizes,
        counts: Counts,
        mesh: Mesh | None,
    ) -> None:
        self._model, self._group, self._sizes, self._counts = model, group, sizes, counts
        self._mesh = mesh
        self._vocab = model.config.vocab_size
        self._queue = Queue(tasks)
        self._stops = group.criteria(tokenizer, mesh)
        self._holds: list[Task | None] = [None] * sizes.slots
        self._ended: list[Done] = []
        self._ready = self._next()
        settings = group.settings([tasks[0].row], self._vocab)
        shapes = slot_shapes(model, group.strategy, sizes, settings, mesh)
        self._slots = empty_slots(shapes, settings)

    def leftover(self) -> tuple[list[Done], list[Task]]:
        """After a failure: sequences finished but not yet yielded, and all unfinished tasks."""
        held = [task for task in self._holds if task is not None]
        ready = [] if self._ready is None else self._ready.tasks
        return self._ended, [*held, *ready, *self._queue.take_all()]

    def run(self) -> Iterator[Done]:
        """Yields finished sequences. The device decodes while the caller handles them."""
        while True:
            self._refill()
            if not any(self._holds):
                break
            seen = self._decode()
            self._ready = self._ready or self._next()
            yield from self._take_ended()
            self._collect(jax.device_get(seen))
        yield from self._take_ended()

    def _take_ended(self) -> Iterator[Done]:
        while self._ended:
            yield self._ended.pop(0)

    def _refill(self) -> None:
        """Prefills the next prompts into free slots while there are enough free slots."""
        free = [slot for slot, task in enumerate(self._holds) if task is None]
        while self._ready is not None and len(self._ready.tasks) <= len(free):
            tasks, arrivals = self._ready.tasks, self._ready.arrivals
            at = np.full(self._sizes.arrivals, self._sizes.slots, np.int32)
            at[: len(tasks)] = free[: len(tasks)]
            for slot, task in zip(free, tasks, strict=False):
                self._holds[slot] = task
            self._ready, free = None, free[len(tasks) :]
            with use(self._mesh):
                self._slots = admit_program(
                    self._model,
                    self._slots,
                    arrivals,
                    at,
                    self._stops,
                    strategy=self._group.strategy,
                    sizes=self._sizes,
                )
            self._counts.admitted(tasks, self._sizes, self._group)
            self._ready = self._next()

    def _decode(self) -> Seen:
        wanted = self._sizes.slots if self._ready is None else len(self._ready.tasks)
        with use(self._mesh):
            self._slots, seen = decode_program(
                self._model,
                self._slots,
                self._stops,
                np.int32(wanted),
                np.int32(MOST_STEPS),
                strategy=self._group.strategy,
            )
        self._counts.decoding(self._sizes, self._group)
        return seen

    def _collect(self, seen: Seen) -> None:
        self._counts.decoded(int(seen.steps), int(seen.busy), self._sizes.slots)
        for slot, task in enumerate(self._holds):
            if task is None or seen.live[slot]:
                continue
            self._holds[slot] = None
            self._ended.extend(_results(task, seen.outputs, slot))

    def _next(self) -> _Ready | None:
        tasks = self._queue.take(self._sizes.arrivals)
        if not tasks:
            return None
        return _Ready(tasks, lay_out(tasks, self._group, self._sizes, self._vocab))


def _results(task: Task, outputs: SlotOutputs, slot: int) -> list[Done]:
    """The finished sequences of a slot."""
    step = int(outputs.first_nonfinite_step[slot])
    if step != NEVER:
        return Done.failed(task, not_finite(step))
    found = []
    for number, text in enumerate(task.texts):
        new = slice(outputs.start[slot], outputs.length[slot, number])
        tokens = outputs.tokens[slot, number, new].tolist()
        reason = "stop" if outputs.stopped[slot, number] else "length"
        if tokens and tokens[-1] in task.row.eos:
            reason = "eos"
        found.append(Done(text, tokens, reason))
    return found
