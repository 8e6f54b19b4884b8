"""Pool of slots that are refilled: the host's side of the batch engine.

While the device decodes, the host prepares the next prompts and yields finished sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.counts import Counts
from jaxllm.batch.programs import DecodeProgress, admit_program, decode_program
from jaxllm.batch.queue import Finished, Queue, Task, not_finite
from jaxllm.batch.row_groups import Group, lay_out
from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import empty_slots, slot_shapes
from jaxllm.batch.slots import Arrivals, SlotOutputs
from jaxllm.generation.strategies.strategy import NEVER
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.sharding import use

MAX_STEPS = 256
"""Decode steps of one call at most, so that progress is shown."""


@dataclasses.dataclass(frozen=True)
class _Ready:
    """Tasks and their arrays, ready for `admit`."""

    tasks: list[Task]
    arrivals: Arrivals


class Pool:
    """Runs the tasks of one group in one set of slots.

    Args:
        model: without metadata (`without_metadata`).
        tasks: all fit `sizes`.
        mesh: of the model.
    """

    def __init__(
        self,
        model: Decoder,
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
        self._running: list[Task | None] = [None] * sizes.slots
        self._ended: list[Finished] = []
        self._ready = self._next()
        settings = group.settings([tasks[0].row], self._vocab)
        shapes = slot_shapes(model, group.strategy, sizes, settings, mesh)
        self._slots = empty_slots(shapes, settings)

    def leftover(self) -> tuple[list[Finished], list[Task]]:
        """After a failure: sequences that had ended, and tasks that wait or were in a slot."""
        held = [task for task in self._running if task is not None]
        ready = [] if self._ready is None else self._ready.tasks
        return self._ended, [*held, *ready, *self._queue.take_all()]

    def run(self) -> Iterator[Finished]:
        """Sequences as they end. The device decodes while the caller reads them."""
        while True:
            self._refill()
            if not any(self._running):
                break
            progress = self._decode()
            self._ready = self._ready or self._next()
            yield from self._take_ended()
            self._collect(jax.device_get(progress))
        yield from self._take_ended()

    def _take_ended(self) -> Iterator[Finished]:
        while self._ended:
            yield self._ended.pop(0)

    def _refill(self) -> None:
        """Prefills prompts into free slots while there are enough of both."""
        free = [slot for slot, task in enumerate(self._running) if task is None]
        while self._ready is not None and len(self._ready.tasks) <= len(free):
            tasks, arrivals = self._ready.tasks, self._ready.arrivals
            at = np.full(self._sizes.arrivals, self._sizes.slots, np.int32)
            at[: len(tasks)] = free[: len(tasks)]
            for slot, task in zip(free, tasks, strict=False):
                self._running[slot] = task
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

    def _decode(self) -> DecodeProgress:
        free_slots = self._sizes.slots if self._ready is None else len(self._ready.tasks)
        with use(self._mesh):
            self._slots, progress = decode_program(
                self._model,
                self._slots,
                self._stops,
                np.int32(free_slots),
                np.int32(MAX_STEPS),
                strategy=self._group.strategy,
            )
        self._counts.decoding(self._sizes, self._group)
        return progress

    def _collect(self, progress: DecodeProgress) -> None:
        self._counts.decoded(int(progress.steps), int(progress.busy), self._sizes.slots)
        for slot, task in enumerate(self._running):
            if task is None or progress.unfinished[slot]:
                continue
            self._running[slot] = None
            self._ended.extend(_results(task, progress.outputs, slot))

    def _next(self) -> _Ready | None:
        tasks = self._queue.take(self._sizes.arrivals)
        if not tasks:
            return None
        return _Ready(tasks, lay_out(tasks, self._group, self._sizes, self._vocab))


def _results(task: Task, outputs: SlotOutputs, slot: int) -> list[Finished]:
    """The finished sequences of a slot."""
    step = int(outputs.first_nonfinite_step[slot])
    if step != NEVER:
        return Finished.failed(task, not_finite(step))
    found = []
    for number, part in enumerate(task.sequences):
        new = slice(outputs.start[slot], outputs.length[slot, number])
        tokens = outputs.tokens[slot, number, new].tolist()
        reason = "stop" if outputs.stopped[slot, number] else "length"
        if tokens and tokens[-1] in task.row.eos:
            reason = "eos"
        found.append(Finished(part, tokens, reason))
    return found
