"""Requests in slots: admits, decodes a few steps, reports the new tokens, and so on.

All of it runs in one thread, which owns the device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.programs import DecodeProgress
from jaxllm.batch.row_groups import prefill_batch
from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import place
from jaxllm.batch.slot_pool import SlotPool
from jaxllm.batch.streamed_slots import Logprobs
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.processors.host.allowed_tokens import WORD_BITS
from jaxllm.generation.strategies.strategy import NEVER, nonfinite_error
from jaxllm.models.decoder import Decoder
from jaxllm.serve.chunks import Chunk, TokenLogprob
from jaxllm.serve.live_rows import (
    ALL_TOKENS,
    LiveGroup,
    LiveRow,
    LiveTask,
    TokenMaskLogitsProcessor,
)

PREFILL_COLUMNS = 2048
"""Columns of the prompts that are prefilled between two decode calls, unless one prompt alone has
more: so long at most do running requests wait for new ones."""


class LiveRun:
    """Tasks of live requests in one pool of slots.

    Args:
        model: without metadata.
        plain_row: any row; free slots have its settings.
        steps_per_call: decode steps between two reports.
    """

    def __init__(
        self,
        model: Decoder,
        group: LiveGroup,
        sizes: Sizes,
        plain_row: LiveRow,
        counts: BatchCounts,
        mesh: Mesh | None,
        steps_per_call: int,
    ) -> None:
        self._group, self._sizes, self._mesh = group, sizes, mesh
        self._vocab = model.config.vocab_size
        self._steps_per_call = steps_per_call
        self._waiting: deque[LiveTask] = deque()
        settings = group.settings([plain_row], self._vocab)
        self._pool = SlotPool(model, None, group, sizes, settings, counts, mesh)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._sizes.slots

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> list[LiveTask]:
        """The tasks in slots."""
        return [task for task in self._tasks if task is not None]

    @property
    def _tasks(self) -> list[LiveTask | None]:
        """The task in each slot."""
        return cast("list[LiveTask | None]", self._pool.tasks)

    @property
    def busy(self) -> bool:
        """True if a task waits or runs."""
        return bool(self._waiting) or self._pool.busy

    def add(self, tasks: Iterable[LiveTask]) -> None:
        """Adds tasks, which run in this order."""
        self._waiting.extend(tasks)

    def take_all(self) -> list[LiveTask]:
        """Ends all tasks and returns them, after a failure."""
        tasks = [*self.running, *self._waiting]
        self._waiting.clear()
        return tasks

    def cancel(self, request: Any, sample: int) -> None:
        """Ends a sample of a request, if it has not ended; its slot is free at once."""

        def ends(task: LiveTask | None) -> bool:
            return task is not None and task.request is request and task.sample == sample

        waiting = next(filter(ends, self._waiting), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        self._release([slot for slot, task in enumerate(self._tasks) if ends(task)])

    def step(self) -> list[tuple[LiveTask, Chunk]]:
        """Prefills prompts that wait, or decodes: the new tokens of all tasks."""
        # After prefill the first tokens are reported; a grammar's next mask follows from them.
        steps = 0 if self._admit() else 1 if self._write_masks() else self._steps_per_call
        pool = self._pool
        free_slots = len(pool.free) + 1 if self._waiting else self._sizes.slots
        progress = jax.device_get(pool.decode(free_slots, steps))
        return self._collect(progress)

    def _admit(self) -> bool:
        """Prefills the first tasks that wait, up to `PREFILL_COLUMNS`; True if there were any."""
        columns = 0
        while self._waiting and self._pool.free:
            tasks = self._next_tasks(min(self._sizes.prefill_rows, len(self._pool.free)))
            columns += tasks[0].width * self._sizes.prefill_rows
            arrays = prefill_batch(tasks, self._group, self._sizes, self._vocab)
            self._pool.prefill(tasks, arrays)
            if columns >= PREFILL_COLUMNS:
                break
        return columns > 0

    def _next_tasks(self, count: int) -> list[LiveTask]:
        """Removes the first task that waits, and the next ones of its bucket."""
        width = self._waiting[0].width
        same_bucket = (task for task in self._waiting if task.width == width)
        tasks = list(itertools.islice(same_bucket, count))
        for task in tasks:
            self._waiting.remove(task)
        return tasks

    def _write_masks(self) -> bool:
        """Writes the masks of rows with a grammar into the slots; True if there are such rows."""
        if not any(task.row.grammar for task in self.running):
            return False
        no_grammar = np.full(-(-self._vocab // WORD_BITS), ALL_TOKENS)
        masks = [
            no_grammar if task is None else task.row.mask(task.tokens, self._vocab)
            for task in self._tasks
        ]

        def replaced(processor: Any) -> Any:
            if not isinstance(processor, TokenMaskLogitsProcessor):
                return processor
            return jax.tree.map(lambda old: self._placed_as(np.stack(masks), old), processor)

        slots = self._pool.slots
        processors = LogitsProcessorList(map(replaced, slots.settings.processors))
        settings = dataclasses.replace(slots.settings, processors=processors)
        self._pool.slots = dataclasses.replace(slots, settings=settings)
        return True

    def _release(self, slots: list[int]) -> None:
        """Frees slots whose rows are not finished."""
        if not slots:
            return
        unfinished = np.array(self._pool.slots.unfinished)
        unfinished[slots] = False
        for slot in slots:
            self._pool.tasks[slot] = None
        arrays = self._pool.slots
        self._pool.slots = dataclasses.replace(
            arrays, unfinished=self._placed_as(unfinished, arrays.unfinished)
        )

    def _placed_as(self, new: np.ndarray, old: jax.Array) -> jax.Array:
        """A host array on the devices of the array that it replaces."""
        return place(new, None if self._mesh is None else old.sharding)

    def _collect(self, progress: DecodeProgress) -> list[tuple[LiveTask, Chunk]]:
        results, stopped = [], []
        tasks = list(self._tasks)
        finished = {slot for slot, _ in self._pool.take_finished(progress)}
        for slot, task in enumerate(tasks):
            if task is None:
                continue
            chunk = _chunk(task, progress, slot, finished=slot in finished)
            task.tokens.extend(chunk.tokens)
            if chunk.is_last and slot not in finished:
                stopped.append(slot)
            if chunk.tokens or chunk.is_last:
                results.append((task, chunk))
        self._release(stopped)
        return results


def _chunk(task: LiveTask, progress: DecodeProgress, slot: int, *, finished: bool) -> Chunk:
    """The new tokens of a slot since the last report."""
    outputs = progress.outputs
    step = int(outputs.first_nonfinite_step[slot])
    if step != NEVER:
        return Chunk(task.sample, (), error=nonfinite_error(step))
    count = int(outputs.total[slot]) - len(task.tokens)
    columns = range(outputs.tokens.shape[1] - count, outputs.tokens.shape[1])
    tokens = [int(outputs.tokens[slot, column]) for column in columns]
    reason = ("eos" if tokens and tokens[-1] in task.row.eos else "length") if finished else None
    if task.stops is not None:
        for number, token in enumerate(tokens, start=1):
            if task.stops.completes(token):
                ends = finished and number == len(tokens) and reason == "eos"
                tokens, reason = tokens[:number], reason if ends else "stop"
                break
    logprobs = None
    if task.row.logprobs:
        kept = list(columns)[: len(tokens)]
        logprobs = tuple(_logprob(outputs.logprobs, slot, column) for column in kept)
    return Chunk(task.sample, tuple(tokens), logprobs, reason)


def _logprob(logprobs: Logprobs, slot: int, column: int) -> TokenLogprob:
    pairs = zip(
        logprobs.top_tokens[slot, column].tolist(),
        logprobs.top[slot, column].tolist(),
        strict=True,
    )
    return TokenLogprob(float(logprobs.chosen[slot, column]), tuple(pairs))
