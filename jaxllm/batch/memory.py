"""Plans pools of slots that fit the memory, which is predicted from their compiled programs."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.programs import chunk_prefill, slot_decode, slot_prefill, slot_start
from jaxllm.batch.prompt_chunks import staged_shapes, with_chunks_of_a_job
from jaxllm.batch.row_groups import Group, Task, group_record, prefill_batch, sizes_for
from jaxllm.batch.rows import BatchRow
from jaxllm.batch.slots import Sizes, slot_shapes
from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError
from jaxllm.common.hardware import format_bytes, nbytes, usable_memory
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.sharding import row_shards, use_mesh

ROWS_OF_A_SLOT = 4
"""Rows of a job for each slot, at least, if it has more than the fewest slots."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted bytes of a pool of slots, per device."""

    weights: int
    cache: int
    """State of all slots: KV cache, sequences and settings; and of prompts that are staged."""
    activations: int
    """Working memory of the compiled programs; 0 if the weights alone do not fit."""
    budget: int
    slots: int
    """Number of slots on all devices together."""
    capacity: int
    devices: int = 1
    lengths: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    """Tokens of the rows for which the pool was chosen, their new ones included: the mean, the 90th
    percentile and the longest."""

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    def rows_at_once(self, tokens: int) -> int:
        """Rows of a length for which memory has room, about: a slot grows with its longest row.

        >>> memory = Prediction(100, 64, 10, 270, slots=4, capacity=64, lengths=(10, 20, 60))
        >>> [memory.rows_at_once(length) for length in memory.lengths]
        [40, 20, 10]
        """
        room = max(self.budget - self.weights - self.activations, 0)
        sizes = (bucket(length, SMALLEST_BUCKET) for length in (tokens, self.lengths[-1]))
        own, longest = sizes
        return room * self.slots * longest // (self.cache * own)

    @property
    def room(self) -> str:
        """How many rows of the job's own lengths memory has room for, in words."""
        kinds = ("the mean of the rows read so far", "their 90th percentile", "the longest")
        parts = [
            f"{self.rows_at_once(tokens):,} of {tokens:,} tokens ({kind})"
            for tokens, kind in zip(self.lengths, kinds, strict=True)
        ]
        return f"memory has room for about {', '.join(parts)}"

    def __str__(self) -> str:
        return (
            f"{self.slots} sequence{'s' * (self.slots != 1)} at a time, up to {self.capacity} "
            f"tokens each: weights {format_bytes(self.weights)}, KV cache "
            f"{format_bytes(self.cache)}, activations {format_bytes(self.activations)}, together "
            f"{format_bytes(self.total)} of {format_bytes(self.budget)}"
            + (f" on each of {self.devices} devices" if self.devices > 1 else "")
        )


def memory_budget(memory: int | str | None, devices: int = 1) -> int:
    """Bytes that a batch may use on each device, weights included.

    Args:
        memory: a number, or a string such as "12GB". None: nine tenths of what the device has, or
            half of the machine's memory where the backend does not say.
        devices: number of devices that share this machine's memory in that case.
    """
    if memory is None:
        return usable_memory(devices)
    if isinstance(memory, str):
        number = memory.strip().upper().removesuffix("B").removesuffix("I")
        unit = number[-1:] if number[-1:] in _UNITS else ""
        try:
            memory = int(float(number.removesuffix(unit)) * _UNITS[unit])
        except (ValueError, OverflowError):
            memory = 0
    if not is_integer(memory) or memory < 1:
        raise InputError('memory: expected a number of bytes or a string such as "12GB"')
    return int(memory)


class SlotLimits(NamedTuple):
    """The fewest and the most slots of a pool, if memory and the number of rows allow them."""

    least: int
    most: int

    def useful(self, tasks: Sequence[Task], more: bool) -> int:
        """The number of slots that suits some tasks. It is more than the least only if there are
        `ROWS_OF_A_SLOT` tasks for each slot, and if the longest task takes no more steps than all
        slots need together. Otherwise many slots would be decoded without a task at the end.

        Args:
            more: more tasks follow.
        """
        if not more:
            new = [task.row.max_new_tokens for task in tasks]
            most = min(self.most, len(new) // ROWS_OF_A_SLOT, sum(new) // max(new))
            slots = min(self.least, bucket(len(new), 1))
        else:
            most = slots = self.most
        while 2 * slots <= most:
            slots *= 2
        return slots


def fitting_slots(predict: Callable[[int], Prediction], slots: int, shards: int) -> Prediction:
    """The prediction for as many slots as fit, up to `slots`; for the fewest if none do.

    Args:
        predict: maps a number of slots to its prediction. It may compile, so it is called rarely.
        shards: the number of slots is a multiple of this.
    """
    while True:
        prediction = predict(slots)
        if prediction.fits or slots == shards:
            return prediction
        per_slot = (prediction.total - prediction.weights) / slots
        fewer_slots = int((prediction.budget - prediction.weights) / per_slot)
        # Activations shrink less than the number of slots: reduce it by an eighth at least.
        fewer_slots = min(fewer_slots, slots * 7 // 8)
        slots = max(1, fewer_slots // shards) * shards


def working_memory(compiled: jax.stages.Compiled, state: int) -> int:
    """Bytes per device that a compiled program needs beyond weights and donated state: temporary
    arrays and other outputs.

    Args:
        state: bytes of the state.
    """
    memory = compiled.memory_analysis()
    if memory is None:  # a backend that does not report it
        return 0
    return memory.temp_size_in_bytes + max(0, memory.output_size_in_bytes - state)


@dataclasses.dataclass(eq=False)
class Pool:
    """A pool of slots of one group, and the tasks that wait for a slot."""

    group: Group
    sizes: Sizes
    memory: Prediction | None = None
    """None: not predicted yet, since an earlier run of the job chose the sizes."""
    fitting: Sizes | None = None
    """`sizes`, or those of shorter sequences that would fit, or None."""
    is_lowered: bool = False
    """Memory has no room for as many slots as were asked for, so that only rows that need slots as
    large as these run here."""
    is_refused: bool = False
    """Not even the fewest slots fit into memory, so that rows get an error."""
    least_width: int = 0
    """Columns to which prompts are padded at least."""
    _waiting: dict[int, list[tuple[int, int, int, Task]]] = dataclasses.field(default_factory=dict)
    """Heaps of tasks by the bucket of their prompts."""
    _read_widths: set[int] = dataclasses.field(default_factory=set)
    """Columns of the prompts or chunks of its tasks so far."""

    def holds(self, row: BatchRow, own: Sizes) -> bool:
        """True if a row runs in this pool.

        Args:
            own: the sizes that the row needs.
        """
        needed, given = (
            (sizes.columns, sizes.encoder_columns or 0, sizes.new_token_bucket)
            for sizes in (own, self.sizes)
        )
        if any(x > y for x, y in zip(needed, given, strict=True)):
            return False
        if self.is_lowered and length_class(own) != length_class(self.sizes):
            return False
        return self.group.accepts(row)

    def add(self, task: Task) -> None:
        """Adds a task that waits. The tasks with the most new tokens come first: a long sequence
        that starts last would be decoded alone, while all other slots are free."""
        entry = (-task.row.max_new_tokens, task.row.index, task.sample, task)
        heapq.heappush(self._waiting.setdefault(task.width, []), entry)
        length, chunked = len(task.row.input_ids), self.sizes.wide > 0
        self._read_widths.update(self.sizes.chunk_widths(length) if chunked else [task.width])

    def take(self, count: int) -> list[Task]:
        """Removes the next tasks, at most `count`, of the bucket whose first one has the most new
        tokens."""
        if (heap := self._next_heap()) is None:
            return []
        return [heapq.heappop(heap)[-1] for _ in range(min(count, len(heap)))]

    def first(self) -> Task:
        """The task that `take` removes first."""
        heap = self._next_heap()
        assert heap is not None
        return heap[0][-1]

    def _next_heap(self) -> list[tuple[int, int, int, Task]] | None:
        heaps = [heap for heap in self._waiting.values() if heap]
        return min(heaps, key=lambda heap: (heap[0][0], -heap[0][-1].width), default=None)

    def record(self) -> dict[str, Any]:
        """The pool as a JSON object, from which `recorded_pool` makes a pool without tasks."""
        return {
            "group": group_record(self.group),
            "sizes": dataclasses.asdict(self.sizes),
            "is_lowered": self.is_lowered,
            "least_width": self.least_width,
        }

    @property
    def is_smallest(self) -> bool:
        """True if there are as few slots as there can be."""
        return self.sizes.slots == self.sizes.shards

    @property
    def waiting(self) -> int:
        """Number of tasks that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def programs(self) -> int:
        """Programs of its tasks so far: one decodes, and one reads the prompts or chunks of each
        width. Another one chooses the first tokens after chunks."""
        count = len(self._read_widths)
        return count and 1 + count + (self.sizes.wide > 0)

    def widest(self) -> Task:
        """One of the waiting tasks with the widest prompts."""
        return self._waiting[max(width for width, heap in self._waiting.items() if heap)][0][-1]


def recorded_pool(record: Mapping[str, Any], group: Group) -> Pool:
    """The pool of a record."""
    options = {name: record[name] for name in ("is_lowered", "least_width")}
    return Pool(group, Sizes(**record["sizes"]), **options)


def length_class(sizes: Sizes) -> tuple[int, int, int]:
    """What rows of one class need of a slot.

    The capacity alone does not tell: with five beams, 64 columns and 64 new tokens have the same
    capacity as 256 columns and 16 new tokens.
    """
    return sizes.capacity, sizes.encoder_columns or 0, sizes.columns


def pools(
    model: Decoder,
    group: Group,
    slots: SlotLimits,
    budget: int,
    mesh: Mesh | None,
    *,
    is_later: bool = False,
    more: bool = False,
) -> Iterator[Pool]:
    """One pool for all tasks of a group if memory allows `slots.least` slots of the longest; else
    the longest have a pool of their own, with fewer slots, and so on with the rest. The tasks are
    not in the pools yet.

    If even the fewest slots do not fit, the pool's `memory.fits` is False.

    Args:
        is_later: the rows are too long for the pools that the group has already. One program reads
            all their prompts.
        more: more rows follow, so that there is work for all slots.
    """
    shards = row_shards(mesh)
    options = (model.is_encoder_decoder, shards, group.beams)
    predict_for = partial(predict, model, group, budget, mesh)
    # Largest slots first.
    by_length: dict[tuple[int, int, int], list[Task]] = {}
    for task in group.tasks():
        by_length.setdefault(length_class(sizes_for([task], 1, *options)), []).append(task)
    classes = [by_length[length] for length in sorted(by_length, reverse=True)]

    def try_slots(tasks: list[Task]) -> tuple[Sizes, Prediction]:
        """Sizes with all slots that are useful, and the prediction for the slots that fit."""
        sizes = sizes_for(tasks, slots.useful(tasks, more), *options)
        chunked = with_chunks_of_a_job(sizes, model)
        memory = fitting_slots(partial(predict_for, tasks, chunked), sizes.slots, shards)
        if memory.fits or not chunked.wide:
            return chunked, memory
        # There may be room for one slot, but not for its prompt beside it.
        return sizes, fitting_slots(partial(predict_for, tasks, sizes), sizes.slots, shards)

    def is_lowered(sizes: Sizes, memory: Prediction) -> bool:
        return not memory.fits or memory.slots < min(slots.least, sizes.slots)

    while classes:
        tasks = [task for tasks in classes for task in tasks]
        sizes, memory = try_slots(tasks)
        if len(classes) > 1 and is_lowered(sizes, memory):
            tasks = classes.pop(0)
            sizes, memory = try_slots(tasks)
        else:
            classes = []
        if not memory.fits:  # the error of its rows states all bytes, with chunks or without
            needed = partial(predict_for, tasks, slots=memory.slots, compile_always=True)
            forms = dict.fromkeys((with_chunks_of_a_job(sizes, model), sizes))
            found = [(form, needed(form)) for form in forms]
            sizes, memory = min(found, key=lambda x: x[1].total)
        lowered = is_lowered(sizes, memory)
        sizes = fitting = dataclasses.replace(sizes, slots=memory.slots)
        if not memory.fits:
            prompt_length = max(len(task.row.decoder_prompt) for task in tasks)
            fitting = sizes.with_half_the_new_tokens(prompt_length)
            while fitting is not None and not predict_for(tasks, fitting, sizes.shards).fits:
                fitting = fitting.with_half_the_new_tokens(prompt_length)
        is_padded = is_later and not sizes.wide
        least_width = max(task.width for task in tasks) if is_padded else 0
        lengths = [len(task.row.input_ids) + task.row.max_new_tokens for task in tasks]
        summary = (np.mean(lengths), np.quantile(lengths, 0.9), max(lengths))
        memory = dataclasses.replace(memory, lengths=tuple(round(float(x)) for x in summary))
        yield Pool(group, sizes, memory, fitting, lowered, not memory.fits, least_width)


def predict(
    model: Decoder,
    group: Group,
    budget: int,
    mesh: Mesh | None,
    tasks: Sequence[Task],
    sizes: Sizes,
    slots: int,
    *,
    compile_always: bool = False,
) -> Prediction:
    """Predicts the memory of a pool with `slots` slots.

    Compiles its programs for the widest prompt bucket, unless weights and cache alone exceed the
    budget (`compile_always`: unless the weights alone do). The pool reuses these programs.
    """
    sizes = dataclasses.replace(sizes, slots=slots)
    widest = max(tasks, key=lambda task: task.width)
    rows = prefill_batch([widest], group, sizes)
    shapes = slot_shapes(model, rows, sizes, mesh)
    staged = staged_shapes(model, sizes, mesh) if sizes.wide else None
    prediction = Prediction(
        weights=nbytes(model),
        cache=nbytes(shapes) + nbytes(staged),
        activations=0,
        budget=budget,
        slots=slots,
        capacity=sizes.capacity,
        devices=1 if mesh is None else mesh.size,
    )
    if not prediction.fits and not (compile_always and prediction.weights < budget):
        return prediction
    with use_mesh(mesh):
        programs = [slot_decode(model, shapes)]
        if staged is None:
            programs.append(slot_prefill(model, shapes, rows, sizes))
        else:
            programs.append(chunk_prefill(model, staged, sizes))
            programs.append(slot_start(model, shapes, staged, rows, sizes))
        activations = max(
            working_memory(program.lower().compile(), prediction.cache) for program in programs
        )
    return dataclasses.replace(prediction, activations=activations)


def too_large_error(row: BatchRow, pool: Pool) -> InputError:
    """The error of a row that cannot run, with the number to change."""
    memory = pool.memory
    assert memory is not None
    if memory.weights >= memory.budget:
        return InputError(
            f"memory: the weights alone take {format_bytes(memory.weights)} of a budget of "
            f"{format_bytes(memory.budget)}; raise memory, or load the model in a smaller dtype"
        )
    needed = (
        f"one slot of {memory.capacity} columns ({_lengths(row)}) takes "
        f"{format_bytes(memory.total)}, but the budget is {format_bytes(memory.budget)}"
    )
    possible = 0 if pool.fitting is None else pool.fitting.max_new_tokens(len(row.decoder_prompt))
    if possible >= 1:
        return InputError(f"max_new_tokens: {needed}; ask for at most {possible}, or raise memory")
    return InputError(f"memory: {needed}; shorten the prompt, or raise memory")


def out_of_memory_error(row: BatchRow, sizes: Sizes) -> InputError:
    """The error of a row for which memory ran out although it was predicted to fit."""
    return InputError(
        f"max_new_tokens: the device ran out of memory with a single slot of {sizes.capacity} "
        f"columns ({_lengths(row)}); ask for fewer"
    )


def _lengths(row: BatchRow) -> str:
    beams = f" for each of {row.config.num_beams} beams" if row.config.num_beams > 1 else ""
    return f"a prompt of {len(row.input_ids)} tokens, {row.max_new_tokens} new ones{beams}"
