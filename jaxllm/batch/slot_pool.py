"""A pool of slots on the device, and the task in each of them.

`SlotPool` calls the programs. Who feeds it decides what runs: `TaskRun` (task_run.py) the rows
of a batch, `jaxllm.serve` the requests of a server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.programs import (
    DecodeProgress,
    decode_slots_program,
    prefill_slots_program,
    steps_per_check_for,
)
from jaxllm.batch.prompt_cache import extend_prompt_program, prefill_rest_program
from jaxllm.batch.queue import Task
from jaxllm.batch.row_groups import Group
from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_arrays import SlotArrays
from jaxllm.batch.slot_placement import empty_slots, slot_shapes
from jaxllm.batch.slots import PrefillBatch, RowSettings, Slots
from jaxllm.cache.kv_cache import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import use_mesh
from jaxllm.tokenizers.tokenizer import Tokenizer


class SlotPool:
    """The slots of one group, and the task in each of them.

    Args:
        model: the model, with RoPE lengths per row.
        settings: settings of one row, [1], which free slots get.
        mesh: of the model.
        few: slots that are decoded alone while the others are free; None: all always are.

    Attributes:
        arrays: the slots on the device. A caller may replace leaves between two calls.
        tasks: the task in each slot; None: the slot is free.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        group: Group,
        sizes: Sizes,
        settings: RowSettings,
        counts: BatchCounts,
        mesh: Mesh | None,
        few: int | None = None,
    ) -> None:
        self._model, self._group, self._sizes, self._counts = model, group, sizes, counts
        self._mesh = mesh
        self._stops = group.criteria(tokenizer, mesh)
        self.tasks: list[Task | None] = [None] * sizes.slots
        shapes = slot_shapes(model, group.strategy, sizes, settings, mesh)
        self.arrays = SlotArrays(empty_slots(shapes, settings), few)

    @property
    def free(self) -> list[int]:
        """Numbers of the free slots."""
        return [slot for slot, task in enumerate(self.tasks) if task is None]

    @property
    def busy(self) -> bool:
        """True if a slot has a task."""
        return any(task is not None for task in self.tasks)

    def prefill(self, tasks: Sequence[Task], arrays: PrefillBatch) -> None:
        """Prefills the prompts of some tasks of one bucket, and puts the tasks into free slots.

        Args:
            tasks: no more than there are free slots.
            arrays: those of the tasks, as `prefill_batch` returns them.
        """
        slot_ids = np.full(self._sizes.prefill_rows, self._sizes.slots, np.int32)
        slot_ids[: len(tasks)] = self.free[: len(tasks)]
        for slot, task in zip(slot_ids, tasks, strict=False):
            self.tasks[slot] = task
        self._counts.doing = f"reading prompts of up to {tasks[0].width} tokens"
        with use_mesh(self._mesh):
            slots = prefill_slots_program(
                self._model,
                self.arrays.all(),
                arrays,
                slot_ids,
                self._stops,
                strategy=self._group.strategy,
                sizes=self._sizes,
            )
        self.arrays.replace(slots)
        self._counts.add_prefill(tasks, self._sizes, self._group)

    def extend_prompt(self, cache: Cache, tokens: Int[np.ndarray, " T"], start: int) -> Cache:
        """Prefills a chunk of a prompt after the first `start` columns of its cache."""
        with use_mesh(self._mesh):
            cache = extend_prompt_program(
                self._model, cache, tokens[None].astype(np.int32), np.int32(start)
            )
        self._counts.add_chunk(len(tokens))
        return cache

    def prefill_rest(
        self, task: Task, arrays: PrefillBatch, cache: Cache, start: int, width: int
    ) -> Cache:
        """Prefills the rest of a prompt, and puts its task into a free slot.

        Args:
            arrays: those of the task, padded to `sizes.columns`.
            cache: has the first `start` columns of the prompt.
            width: columns of the rest, padding included.

        Returns:
            The cache of the prompt.
        """
        slot = self.free[0]
        self.tasks[slot] = task
        with use_mesh(self._mesh):
            slots, cache = prefill_rest_program(
                self._model,
                self.arrays.all(),
                cache,
                np.int32(start),
                arrays,
                np.array([slot], np.int32),
                self._stops,
                strategy=self._group.strategy,
                sizes=self._sizes,
                width=width,
            )
        self.arrays.replace(slots)
        self._counts.add_rest(width, self._sizes, self._group)
        return cache

    def decode(self, free_slots: int, max_steps: int) -> DecodeProgress:
        """Decodes until `free_slots` slots are free, all rows are finished, or for `max_steps`
        steps. The results are on the device, which may still be decoding, and may have the first
        slots only, all busy ones among them. On a GPU the other rows may be up to three steps
        further."""
        last_busy = max((i for i, task in enumerate(self.tasks) if task is not None), default=-1)
        slots = self.arrays.first(last_busy + 1)
        return self._decode(slots, free_slots - (self._sizes.slots - slots.count), max_steps)

    def run_decode_programs(self) -> None:
        """Runs each program of decoding once, without a step."""
        self._decode(self.arrays.first(0), 1, 0)
        self._decode(self.arrays.all(), 1, 0)

    def _decode(self, slots: Slots, free_slots: int, max_steps: int) -> DecodeProgress:
        platform, sizes = platform_of_arrays(slots.unfinished), self._sizes.with_slots(slots.count)
        self._counts.doing = f"decoding {slots.count} rows at once"
        with use_mesh(self._mesh):
            slots, progress = decode_slots_program(
                self._model,
                slots,
                self._stops,
                np.int32(free_slots),
                np.int32(max_steps),
                strategy=self._group.strategy,
                steps_per_check=steps_per_check_for(max_steps, platform),
            )
        self.arrays.replace(slots)
        self._counts.add_decode_call(sizes, self._group)
        return progress

    def take_finished(self, progress: DecodeProgress) -> list[tuple[int, Task]]:
        """Frees the slots whose rows are finished; returns their numbers and tasks.

        Args:
            progress: of a decode call, on the host.
        """
        self._counts.add_decode_steps(
            int(progress.steps), int(progress.busy_slot_steps), len(progress.unfinished)
        )
        finished = []
        for slot, task in enumerate(self.tasks):
            if task is not None and not progress.unfinished[slot]:
                self.tasks[slot] = None
                finished.append((slot, task))
        return finished
