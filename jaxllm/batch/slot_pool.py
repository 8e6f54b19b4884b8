"""A pool of slots on the device, the task in each of them, and the counters of what runs.

`SlotPool` calls the programs. Who feeds it decides what runs: `TaskRun` (task_run.py) the rows
of a batch, `jaxllm.serve` the requests of a server.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxllm.batch.programs import slot_prefill, slot_start
from jaxllm.batch.prompt_chunks import (
    PromptColumns,
    StagedPrompt,
    copy_prompt,
    prefill_chunk,
    staged_shapes,
    start_rows,
    write_prefix,
)
from jaxllm.batch.row_groups import Group, Task, prefill_batch, prompt_rows
from jaxllm.batch.rows import BatchOutput
from jaxllm.batch.slots import (
    DecodeProgress,
    PromptRows,
    Sizes,
    Slots,
    decode_slots,
    empty_arrays,
    empty_slots,
    place,
    prefill_slots,
    slot_shapes,
    steps_per_check_for,
)
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.processors.base import LogitsProcessor, RowProcessors
from jaxllm.generation.strategies.strategy import Result
from jaxllm.models.decoder import Decoder, FlatModel
from jaxllm.parallel.field_axes import Axes, map_with_axes
from jaxllm.parallel.placement import platform_of_arrays, wait_on_cpu_mesh
from jaxllm.parallel.sharding import use_mesh

Trace: TypeAlias = Callable[[], jax.stages.Traced]
ProgramTable: TypeAlias = dict[str, Callable[[], object]]
"""Functions that compile programs, by the names of the programs."""

COPY, WRITE_PREFIX = "copy of a prompt", "write of a prefix"
"""Names of the programs of kept prefixes."""
WRITE_FIRST = "write of the first slots"
"""Name of the last program that is compiled for a decoding of the first few slots."""
MIN_SLOTS = 8
"""Slots below which a copy of a quarter of them would save little."""


def few_slots(slots: int, platform: str) -> int | None:
    """Number of first slots that are decoded alone while the others are free; None: all always are.

    >>> few_slots(16, "cpu"), few_slots(4, "cpu"), few_slots(128, "tpu")
    (4, None, None)
    """
    # PERF(cpu): a decode step of 16 rows takes twice as long as one of 4; benchmarks/README.md. On
    # an accelerator both take the time in which the weights are read.
    return slots // 4 if platform == "cpu" and slots >= MIN_SLOTS else None


@partial(jax.jit, static_argnames="count")
def first_rows(slots: Slots, *, count: int) -> Slots:
    """A copy of the first `count` slots."""

    def rows(axes: Axes, x: Array) -> Array:
        has_rows = "rows" in axes and x.ndim
        # jit would return the buffer of `slots` itself, which decoding the copy then donates.
        return x[: x.shape[0] // slots.count * count] if has_rows else jnp.copy(x)

    return map_with_axes(rows, slots)


@partial(jax.jit, donate_argnames="slots")
def with_first_rows(slots: Slots, first: Slots) -> Slots:
    """The slots with other first rows, which are written in place."""

    def write(x: Array, rows: Array) -> Array:
        return jax.lax.dynamic_update_slice(x, rows, (0,) * x.ndim)

    return jax.tree.map(write, slots, first)


@dataclasses.dataclass
class BatchCounts:
    """Counters of one run, all of them exact."""

    rows_read: int = 0
    """Rows that are read, those with errors included."""
    work: int = 0
    """Size of the rows that are read and can run, for the time left: the sum of their new-token
    limits where rows generate."""
    work_done: int = 0
    """Size of finished rows."""
    rows: int = 0
    """Finished rows, those with errors included."""
    sequences: int = 0
    """Finished sequences."""
    prompt_tokens: int = 0
    """Prompt tokens of finished rows."""
    new_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens of all prefills; a prompt counts once for each sample."""
    prefill_columns: int = 0
    """Columns of all prefills, the padding of buckets included."""
    decode_steps: int = 0
    slot_steps: int = 0
    """Decode steps times the slots that they decoded. All beams of a row are one slot."""
    busy_slot_steps: int = 0
    """Slot-steps occupied by an unfinished row."""
    cut_texts: int = 0
    """Texts that were cut to the most tokens that the model takes."""
    halvings: int = 0
    """Number of times that memory ran out and the slots were halved."""
    programs: int = 0
    """Programs that the rows need, as far as they are known; `program_calls` has the programs that
    ran."""
    doing: str = ""
    """What the engine computes or compiles at this moment, in words."""
    program_calls: Counter[str] = dataclasses.field(default_factory=Counter)
    """Calls of each compiled program, by a name that includes its bucket."""
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows with errors, by error class."""
    finish_reasons: Counter[str] = dataclasses.field(default_factory=Counter)

    @staticmethod
    def total(parts: Iterable[BatchCounts]) -> BatchCounts:
        """Sums the counters of several runs."""
        total = BatchCounts()
        for part in parts:
            for name in vars(total).keys() - {"doing"}:
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    @property
    def answered(self) -> int:
        """Finished rows without an error."""
        return self.rows - self.errors.total()

    @property
    def tokens(self) -> int:
        """New tokens of finished and unfinished rows."""
        return max(self.new_tokens, self.busy_slot_steps)

    @property
    def utilisation(self) -> float:
        """The share of slot-steps occupied by an unfinished row."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0

    def add_decode_steps(self, steps: int, busy_slot_steps: int, slots: int) -> None:
        """Counts the steps of a decode call."""
        self.decode_steps += steps
        self.busy_slot_steps += busy_slot_steps
        self.slot_steps += steps * slots

    def add_output(self, output: BatchOutput) -> None:
        """Counts a finished row."""
        self.rows += 1
        if output.error_kind is not None:
            self.errors[output.error_kind] += 1
            return
        self.sequences += len(output.new_lengths)
        self.prompt_tokens += output.prompt_tokens
        self.new_tokens += sum(output.new_lengths)
        self.finish_reasons.update(output.finish_reasons)

    def add_halving(self) -> None:
        """Counts a halving of the slots."""
        self.halvings += 1

    def add_call(self, program: str) -> None:
        """Counts a call of a compiled program."""
        self.program_calls[program] += 1

    def to_dict(self) -> dict[str, Any]:
        """The counters as a JSON object."""
        return {**vars(self), "utilisation": self.utilisation}


class Window(NamedTuple):
    """Decode steps that are dispatched, which the device may still be running."""

    tasks: tuple[Task | None, ...]
    """The tasks of the slots when it was dispatched. It may have the first slots only, all busy
    ones among them."""
    progress: DecodeProgress
    """On the device; `SlotPool.read` reads it."""


class SlotPool:
    """The slots of one group, and the task in each of them.

    Args:
        model: the model, with RoPE lengths per row.
        plain: a task whose settings free slots get.
        mesh: of the model.
        few: slots that are decoded alone while the others are free; None: all always are.

    Attributes:
        sizes: of the slots.
        tasks: the task in each slot; None: the slot is free.
        few: as given.
    """

    def __init__(
        self,
        model: Decoder,
        group: Group,
        sizes: Sizes,
        plain: Task,
        counts: BatchCounts,
        mesh: Mesh | None,
        few: int | None = None,
    ) -> None:
        self._model, self._group = FlatModel.of(model), group
        self.sizes, self._counts, self._mesh = sizes, counts, mesh
        self.tasks: list[Task | None] = [None] * sizes.slots
        rows = prompt_rows([plain], group, sizes, plain.width)
        self._shapes = slot_shapes(model, rows, sizes, mesh)
        self._all, self.few = empty_slots(self._shapes, rows), few
        self._prompts: dict[int, StagedPrompt] = {}
        """The prompts that are prefilled in chunks, by the number of their row."""
        self._staged_shapes = staged_shapes(model, sizes, mesh) if sizes.wide else None
        self._staged = empty_arrays(self._staged_shapes)
        self._first: Slots | None = None
        """Stands for the first rows of `_all` while it is not None."""

    @property
    def slots(self) -> Slots:
        """The slots on the device: all, or the first few if these were decoded last, with all busy
        ones among them."""
        return self._all if self._first is None else self._first

    @slots.setter
    def slots(self, slots: Slots) -> None:
        if self._first is None:
            self._all = slots
        else:
            self._first = slots

    def _all_slots(self) -> Slots:
        """All slots, also if the first few were decoded last."""
        if self._first is not None:
            self._all, self._first = with_first_rows(self._all, self._first), None
        return self._all

    def _first_slots(self, count: int) -> Slots:
        """The first few slots if `count` are no more, else all."""
        if self.few is None or count > self.few:
            return self._all_slots()
        if self._first is None:
            self._first = first_rows(self._all, count=self.few)
        return self.slots

    @property
    def free(self) -> list[int]:
        """Numbers of the free slots."""
        return [slot for slot, task in enumerate(self.tasks) if task is None]

    @property
    def busy(self) -> bool:
        """True if a slot has a task."""
        return any(task is not None for task in self.tasks)

    def prepare(self, tasks: Sequence[Task]) -> PromptRows:
        """The rows of some tasks of one bucket, for `prefill`. Prompts in chunks are prefilled at
        once, and wait beside the slots; no others may be staged."""
        if self.sizes.wide:
            for task in tasks:
                self.stage(task)
            while not all(prompt.is_complete for prompt in self._prompts.values()):
                self._prefill_chunk()
            self._prompts.clear()
        return prefill_batch(tasks, self._group, self.sizes)

    def prefill(self, tasks: Sequence[Task], rows: PromptRows) -> None:
        """Prefills the prompts of some tasks of one bucket, and puts the tasks into free slots.

        Args:
            tasks: no more than there are free slots.
            rows: the prompts and settings of the tasks, as `prepare` returns them.
        """
        slot_ids = np.full(self.sizes.prefill_rows, self.sizes.slots, np.int32)
        slot_ids[: len(tasks)] = self.free[: len(tasks)]
        for slot, task in zip(slot_ids, tasks, strict=False):
            self.tasks[slot] = task
        if self.sizes.wide:
            self._start(rows, slot_ids)
            return
        self._counts.doing = f"reading prompts of up to {tasks[0].width} tokens"
        with use_mesh(self._mesh):
            self.slots = prefill_slots(
                self._model,
                self._all_slots(),
                rows,
                slot_ids,
                new_token_bucket=self.sizes.new_token_bucket,
            )
        wait_on_cpu_mesh(self.slots)
        count, width = self.sizes.prefill_rows, tasks[0].width
        self._counts.prefill_tokens += sum(len(task.row.input_ids) for task in tasks)
        self._counts.prefill_columns += count * width
        self._counts.add_call(self.prefill_name(width))

    @property
    def staged(self) -> list[Task]:
        """The tasks whose prompts are prefilled in chunks, in their order."""
        return [prompt.task for prompt in self._prompts.values()]

    def stage(self, task: Task, prefix: Cache | None = None, length: int = 0) -> None:
        """Gives a task one of the `prefill_rows` rows in which prompts are prefilled in chunks.

        Args:
            prefix: a copied prompt (`copy_prompt`) that begins with the first `length` columns of
                the task's prompt; a multiple of the narrow width.
        """
        row = min(set(range(self.sizes.prefill_rows)) - self._prompts.keys())
        self._prompts[row] = StagedPrompt(task, length)
        if prefix is not None:
            assert self._staged is not None
            with use_mesh(self._mesh):
                self._staged = write_prefix(
                    self._staged, prefix, np.array([length], np.int32), np.array([row], np.int32)
                )

    def unstage(self, ends: Callable[[Task], bool]) -> None:
        """Forgets staged tasks, those for which `ends` is true."""
        for row, prompt in [*self._prompts.items()]:
            if ends(prompt.task):
                del self._prompts[row]

    @property
    def next_columns(self) -> int:
        """Columns of the next chunk of staged prompts."""
        return PromptColumns.next_of(self._prompts, self.sizes).tokens.shape[1]

    def prefill_chunk(self) -> tuple[int, list[tuple[int, Task]]]:
        """Prefills the next chunk of staged prompts, that of the first one and those beside it.
        Puts the tasks of complete prompts into free slots.

        Returns:
            The columns of the chunk. The tasks that came into slots, with the rows that they had,
            for `copy_prompt`.
        """
        chunk, complete = self._prefill_chunk(), []
        for row in chunk.rows.tolist():
            if row in self._prompts and self._prompts[row].is_complete:
                complete.append((row, self._prompts.pop(row).task))
        if complete:
            tasks = [complete[0][1]] * self.sizes.prefill_rows
            slot_ids = np.full(len(tasks), self.sizes.slots, np.int32)
            for (row, task), slot in zip(complete, self.free, strict=False):
                tasks[row], slot_ids[row], self.tasks[slot] = task, slot, task
            self._start(prompt_rows(tasks, self._group, self.sizes, self.sizes.columns), slot_ids)
        return chunk.tokens.shape[1], complete

    def _prefill_chunk(self) -> PromptColumns:
        """Prefills the next chunk of the staged prompts that are not complete."""
        assert self._staged is not None
        chunk = PromptColumns.next_of(self._prompts, self.sizes)
        self._counts.doing = f"reading parts of {np.count_nonzero(chunk.lengths)} prompts"
        with use_mesh(self._mesh):
            self._staged = prefill_chunk(self._model, self._staged, chunk)
        wait_on_cpu_mesh(self._staged)
        self._counts.prefill_tokens += int(chunk.lengths.sum())
        self._counts.prefill_columns += chunk.tokens.size
        self._counts.add_call(self._chunk_name(chunk))
        for row, length in zip(chunk.rows.tolist(), chunk.lengths.tolist(), strict=True):
            if length:
                self._prompts[row].length += length
        return chunk

    def _start(self, rows: PromptRows, slot_ids: Int[np.ndarray, " R"]) -> None:
        """Puts complete prompts into slots.

        Args:
            rows: of all staged rows.
            slot_ids: the slot of each; for other rows the number of slots, which is no slot.
        """
        assert self._staged is not None
        with use_mesh(self._mesh):
            self.slots = start_rows(
                self._model,
                self._all_slots(),
                self._staged,
                rows,
                slot_ids,
                new_token_bucket=self.sizes.new_token_bucket,
            )
        wait_on_cpu_mesh(self.slots)
        self._counts.add_call(self._start_name)

    def copy_prompt(self, row: int) -> Cache:
        """A copy of the keys and values of a prompt, the last one in a row, to keep a prefix."""
        assert self._staged is not None
        with use_mesh(self._mesh):
            return copy_prompt(self._staged, np.array([row], np.int32))

    def decode(self, until_free: int, max_steps: int) -> Window:
        """Decodes until `until_free` slots are free, all rows are finished, or for `max_steps`
        steps. On a GPU the other rows may be up to three steps further."""
        last_busy = max((i for i, task in enumerate(self.tasks) if task is not None), default=-1)
        slots = self._first_slots(last_busy + 1)
        return self._decode(slots, until_free - (self.sizes.slots - slots.count), max_steps)

    def _decode(self, slots: Slots, until_free: int, max_steps: int) -> Window:
        tasks = tuple(self.tasks[: slots.count])
        platform = platform_of_arrays(slots.state.reason)
        self._counts.doing = f"decoding {slots.count} rows at once"
        with use_mesh(self._mesh):
            self.slots, progress = decode_slots(
                self._model,
                slots,
                np.array([task is None for task in tasks]),
                np.int32(until_free),
                np.int32(max_steps),
                steps_per_check=steps_per_check_for(max_steps, platform),
            )
        self._counts.add_call(self.decode_name(slots.count))
        return Window(tasks, progress)

    def decode_name(self, count: int) -> str:
        """Name of the program that decodes so many slots."""
        return self._name("decode", self.sizes.with_slots(count))

    def prefill_name(self, width: int) -> str:
        """Name of the program that prefills whole prompts of a bucket."""
        return self._name(f"prefill {self.sizes.prefill_rows} x {width} into", self.sizes)

    def _chunk_name(self, chunk: PromptColumns) -> str:
        shape = *chunk.tokens.shape, self.sizes.prefill_rows, self.sizes.capacity
        return "prefill {} x {} of {} x {}".format(*shape)

    @property
    def _start_name(self) -> str:
        return self._name(f"first tokens of {self.sizes.prefill_rows} into", self.sizes)

    def _name(self, program: str, sizes: Sizes) -> str:
        """Name of a program over slots of these sizes."""
        name = f"{program} {sizes.slots} x {sizes.capacity}"
        if sizes.encoder_columns is not None:
            name += f" (encoder {sizes.encoder_columns})"
        if sizes.beams > 1:
            name += f" of {sizes.beams} beams"
        return name + (f", group {self._group.number}" if self._group.number else "")

    def programs(
        self, tasks: Sequence[Task], steps: Iterable[int], *, copies: bool
    ) -> list[ProgramTable]:
        """Functions that compile the programs of this pool, by name.

        Args:
            tasks: one for each bucket of prompts that are prefilled as a whole, the widest last;
                any one if prompts are prefilled in chunks.
            steps: the numbers of steps of decode calls.
            copies: prompts are copied, to keep prefixes.

        Returns:
            The programs by which any prompt can be prefilled and decoded; and those that do the
            same faster, or that few prompts need.
        """
        model, sizes = self._model.model(), self.sizes
        shapes, staged = self._shapes, self._staged_shapes
        one, platform = np.int32(1), platform_of_arrays(model)
        intervals = [*dict.fromkeys(steps_per_check_for(number, platform) for number in steps)]

        def decode(slots: Slots, interval: int) -> Trace:
            arguments = self._model, slots, np.zeros(slots.count, bool), one, one
            return partial(decode_slots.trace, *arguments, steps_per_check=interval)

        needed = {self.decode_name(sizes.slots): decode(shapes, intervals[0])}
        others: dict[str, Trace] = {}
        if self.few is not None:
            first = jax.eval_shape(partial(first_rows, count=self.few), shapes)
            others[self.decode_name(self.few)] = decode(first, intervals[0])
            others["copy of the first slots"] = partial(first_rows.trace, shapes, count=self.few)
            others[WRITE_FIRST] = partial(with_first_rows.trace, shapes, first)
        if staged is None:
            for task in tasks:
                rows = prefill_batch([task], self._group, sizes)
                trace = partial(slot_prefill, model, shapes, rows, sizes)
                (needed if task is tasks[-1] else others)[self.prefill_name(task.width)] = trace
        else:
            for chunk in (PromptColumns.empty(rows, width) for rows, width in sizes.chunks):
                needed[self._chunk_name(chunk)] = partial(
                    prefill_chunk.trace, self._model, staged, chunk
                )
            rows = prefill_batch(tasks[:1], self._group, sizes)
            needed[self._start_name] = partial(slot_start, model, shapes, staged, rows, sizes)
        if staged is not None and copies:
            prompt = staged_shapes(model, sizes.with_slots(1), self._mesh).cache
            number = np.zeros(1, np.int32)
            others[COPY] = partial(copy_prompt.trace, staged, number)
            others[WRITE_PREFIX] = partial(write_prefix.trace, staged, prompt, number, number)
        for interval in intervals[1:]:
            name = f"{self.decode_name(sizes.slots)}, {interval} steps between checks"
            others[name] = decode(shapes, interval)
        return [
            {name: partial(self._compile, trace) for name, trace in table.items()}
            for table in (needed, others)
        ]

    def _compile(self, trace: Trace) -> None:
        with use_mesh(self._mesh):
            trace().lower().compile()

    def read(self, window: Window) -> tuple[Result, list[tuple[int, Task, bool]]]:
        """Waits for a window, and frees the slots whose rows have ended. Windows are read in the
        order in which they were dispatched.

        Returns:
            The results of the slots. The number and the task of each slot that counts, and True if
            its row has ended. A slot whose task has ended or was cancelled since the window was
            dispatched does not count.
        """
        progress: DecodeProgress = jax.device_get(window.progress)
        self._counts.add_decode_steps(
            int(progress.steps), int(progress.busy_slot_steps), len(progress.unfinished)
        )
        rows = []
        for slot, task in enumerate(window.tasks):
            if task is not None and task is self.tasks[slot]:
                has_ended = not progress.unfinished[slot]
                rows.append((slot, task, has_ended))
                if has_ended:
                    self.tasks[slot] = None
        return progress.result, rows

    def cancel(self, slots: Iterable[int]) -> None:
        """Frees slots whose rows have not ended. The next window stops the rows."""
        for slot in slots:
            self.tasks[slot] = None

    def write_processor(self, new: LogitsProcessor) -> None:
        """Replaces the logits processor of the same class in all of `slots`.

        Args:
            new: has host arrays with a row for each slot of `slots`.
        """

        def replaced(old: Any) -> Any:
            return jax.tree.map(self._placed_as, new, old) if type(old) is type(new) else old

        settings = self.slots.settings
        processors = RowProcessors(map(replaced, settings.processors))
        settings = dataclasses.replace(settings, processors=processors)
        self.slots = dataclasses.replace(self.slots, settings=settings)

    def _placed_as(self, new: np.ndarray, old: jax.Array) -> jax.Array:
        """A host array on the devices of the array that it replaces."""
        return place(new, None if self._mesh is None else old.sharding)
