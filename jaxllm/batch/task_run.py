"""Runs the tasks of a batch through one pool of slots.

While the device decodes, the host prepares the next prompts and yields finished sequences.
`BatchGenerator` chooses the pools, and halves them when memory runs out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.row_groups import FinishedSequence, Group, Task, prefill_batch
from jaxllm.batch.slot_pool import SlotPool
from jaxllm.batch.slots import PromptRows, Sizes
from jaxllm.generation.strategies.strategy import (
    FINISH_REASONS,
    NONFINITE,
    Result,
    nonfinite_error,
)
from jaxllm.models.decoder import Decoder

MAX_STEPS = 256
"""Decode steps of one call at most, so that progress is shown."""


class Queue:
    """Tasks that wait for a slot, in buckets of power-of-two prompt lengths.

    Those with the most new tokens come first: a long sequence that starts last would be decoded
    alone, while all other slots are free.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._buckets: dict[int, deque[Task]] = {}
        for task in sorted(
            tasks, key=lambda task: (-task.row.max_new_tokens, task.row.index, task.sample)
        ):
            self._buckets.setdefault(task.width, deque()).append(task)

    def take(self, count: int) -> list[Task]:
        """Removes up to `count` tasks of one bucket, that of the task with the most new tokens."""
        candidates = [tasks for tasks in self._buckets.values() if tasks]
        if not candidates:
            return []
        tasks = max(candidates, key=lambda tasks: (tasks[0].row.max_new_tokens, tasks[0].width))
        return [tasks.popleft() for _ in range(min(count, len(tasks)))]

    def take_all(self) -> list[Task]:
        """All tasks that wait."""
        tasks = [task for bucket in self._buckets.values() for task in bucket]
        self._buckets.clear()
        return tasks


class TaskRun:
    """Runs the tasks of one group in one pool of slots.

    Args:
        model: the model, with RoPE lengths per row.
        tasks: all fit `sizes`.
        mesh: of the model.
    """

    def __init__(
        self,
        model: Decoder,
        group: Group,
        tasks: Sequence[Task],
        sizes: Sizes,
        counts: BatchCounts,
        mesh: Mesh | None,
    ) -> None:
        self._group, self._sizes = group, sizes
        self._queue = Queue(tasks)
        self._finished: list[FinishedSequence] = []
        self._next_batch = self._take_next_batch()
        self._pool = SlotPool(model, group, sizes, tasks[0], counts, mesh)

    def leftover(self) -> tuple[list[FinishedSequence], list[Task]]:
        """After a failure: sequences that had ended, and tasks that wait or were in a slot."""
        running = [task for task in self._pool.tasks if task is not None]
        next_tasks = [] if self._next_batch is None else self._next_batch[0]
        return self._finished, [*running, *next_tasks, *self._queue.take_all()]

    def run(self) -> Iterator[FinishedSequence]:
        """Sequences as they end. The device decodes while the caller reads them."""
        while True:
            self._refill()
            if not self._pool.busy:
                break
            next_batch = self._next_batch
            free_slots = self._sizes.slots if next_batch is None else len(next_batch[0])
            progress = self._pool.decode(free_slots, MAX_STEPS)
            self._next_batch = self._next_batch or self._take_next_batch()
            yield from self._take_finished()
            progress = jax.device_get(progress)
            for slot, task in self._pool.take_finished(progress):
                self._finished.extend(_sequences(task, progress.result, slot))
        yield from self._take_finished()

    def _take_finished(self) -> Iterator[FinishedSequence]:
        while self._finished:
            yield self._finished.pop(0)

    def _refill(self) -> None:
        """Prefills prompts into free slots while there are enough of both."""
        while (batch := self._next_batch) and len(batch[0]) <= len(self._pool.free):
            self._next_batch = None  # from here on its tasks are in slots
            self._pool.prefill(*batch)
            self._next_batch = self._take_next_batch()

    def _take_next_batch(self) -> tuple[list[Task], PromptRows] | None:
        """The next tasks and their rows, ready for `prefill`."""
        tasks = self._queue.take(self._sizes.prefill_rows)
        return (tasks, prefill_batch(tasks, self._group, self._sizes)) if tasks else None


def _sequences(task: Task, result: Result, slot: int) -> list[FinishedSequence]:
    """The finished sequences of a slot; its beams, if there are several, are adjacent rows of the
    result."""
    sequences = []
    for i, sample in enumerate(task.samples, start=slot * task.row.config.num_beams):
        count, reason = int(result.lengths[i]), int(result.finish_reasons[i])
        if reason == NONFINITE:
            return FinishedSequence.failed(task, nonfinite_error(count))
        start = len(task.row.decoder_prompt)
        tokens = result.sequences[i, start : start + count].tolist()
        sequences.append(FinishedSequence(sample, tokens, FINISH_REASONS[reason]))
    return sequences
