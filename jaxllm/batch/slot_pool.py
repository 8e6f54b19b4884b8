"""Pool of slots that are refilled: the host's side of the batch engine.

While the device decodes, the host prepares the next prompts and yields finished sequences.
`BatchGenerator` chooses the pools, and halves them when memory runs out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.programs import DecodeProgress, decode_program, prefill_program
from jaxllm.batch.queue import FinishedSequence, Queue, Task
from jaxllm.batch.row_groups import Group, prefill_batch
from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import empty_slots, slot_shapes
from jaxllm.batch.slots import PrefillBatch, SlotOutputs
from jaxllm.generation.strategies.strategy import NEVER, nonfinite_error
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.sharding import use_mesh
from jaxllm.tokenizers.tokenizer import Tokenizer

MAX_STEPS = 256
"""Decode steps of one call at most, so that progress is shown."""


@dataclasses.dataclass(frozen=True)
class _NextBatch:
    """Tasks and their arrays, ready for `prefill`."""

    tasks: list[Task]
    arrays: PrefillBatch


class SlotPool:
    """Runs the tasks of one group in one set of slots.

    Args:
        model: without metadata (`without_metadata`).
        tasks: all fit `sizes`.
        mesh: of the model.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        group: Group,
        tasks: Sequence[Task],
        sizes: Sizes,
        counts: BatchCounts,
        mesh: Mesh | None,
    ) -> None:
        self._model, self._group, self._sizes, self._counts = model, group, sizes, counts
        self._mesh = mesh
        self._vocab = model.config.vocab_size
        self._queue = Queue(tasks)
        self._stops = group.criteria(tokenizer, mesh)
        self._running: list[Task | None] = [None] * sizes.slots
        self._finished: list[FinishedSequence] = []
        self._next_batch = self._take_next_batch()
        settings = group.settings([tasks[0].row], self._vocab)
        shapes = slot_shapes(model, group.strategy, sizes, settings, mesh)
        self._slots = empty_slots(shapes, settings)

    def leftover(self) -> tuple[list[FinishedSequence], list[Task]]:
        """After a failure: sequences that had ended, and tasks that wait or were in a slot."""
        running = [task for task in self._running if task is not None]
        next_tasks = [] if self._next_batch is None else self._next_batch.tasks
        return self._finished, [*running, *next_tasks, *self._queue.take_all()]

    def run(self) -> Iterator[FinishedSequence]:
        """Sequences as they end. The device decodes while the caller reads them."""
        while True:
            self._refill()
            if not any(self._running):
                break
            progress = self._decode()
            self._next_batch = self._next_batch or self._take_next_batch()
            yield from self._take_finished()
            self._collect(jax.device_get(progress))
        yield from self._take_finished()

    def _take_finished(self) -> Iterator[FinishedSequence]:
        while self._finished:
            yield self._finished.pop(0)

    def _refill(self) -> None:
        """Prefills prompts into free slots while there are enough of both."""
        free = [slot for slot, task in enumerate(self._running) if task is None]
        while self._next_batch is not None and len(self._next_batch.tasks) <= len(free):
            tasks, arrays = self._next_batch.tasks, self._next_batch.arrays
            slot_ids = np.full(self._sizes.prefill_rows, self._sizes.slots, np.int32)
            slot_ids[: len(tasks)] = free[: len(tasks)]
            for slot, task in zip(free, tasks, strict=False):
                self._running[slot] = task
            self._next_batch, free = None, free[len(tasks) :]
            with use_mesh(self._mesh):
                self._slots = prefill_program(
                    self._model,
                    self._slots,
                    arrays,
                    slot_ids,
                    self._stops,
                    strategy=self._group.strategy,
                    sizes=self._sizes,
                )
            self._counts.add_prefill(tasks, self._sizes, self._group)
            self._next_batch = self._take_next_batch()

    def _decode(self) -> DecodeProgress:
        next_batch = self._next_batch
        free_slots = self._sizes.slots if next_batch is None else len(next_batch.tasks)
        with use_mesh(self._mesh):
            self._slots, progress = decode_program(
                self._model,
                self._slots,
                self._stops,
                np.int32(free_slots),
                np.int32(MAX_STEPS),
                strategy=self._group.strategy,
            )
        self._counts.add_decode_call(self._sizes, self._group)
        return progress

    def _collect(self, progress: DecodeProgress) -> None:
        self._counts.add_decode_steps(
            int(progress.steps), int(progress.busy_slot_steps), self._sizes.slots
        )
        for slot, task in enumerate(self._running):
            if task is None or progress.unfinished[slot]:
                continue
            self._running[slot] = None
            self._finished.extend(_sequences(task, progress.outputs, slot))

    def _take_next_batch(self) -> _NextBatch | None:
        tasks = self._queue.take(self._sizes.prefill_rows)
        if not tasks:
            return None
        return _NextBatch(tasks, prefill_batch(tasks, self._group, self._sizes, self._vocab))


def _sequences(task: Task, outputs: SlotOutputs, slot: int) -> list[FinishedSequence]:
    """The finished sequences of a slot."""
    step = int(outputs.first_nonfinite_step[slot])
    if step != NEVER:
        return FinishedSequence.failed(task, nonfinite_error(step))
    sequences = []
    for number, sample in enumerate(task.samples):
        new = slice(outputs.prompt_length[slot], outputs.length[slot, number])
        tokens = outputs.tokens[slot, number, new].tolist()
        reason = "stop" if outputs.stopped[slot, number] else "length"
        if tokens and tokens[-1] in task.row.eos:
            reason = "eos"
        sequences.append(FinishedSequence(sample, tokens, reason))
    return sequences
