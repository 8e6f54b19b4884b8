"""Plans pools of slots that fit the memory, which is predicted from their compiled programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
from jax.sharding import Mesh

from jaxllm.batch.programs import slot_decode, slot_prefill
from jaxllm.batch.row_groups import Group, Task, prefill_batch, sizes_for
from jaxllm.batch.rows import BatchRow
from jaxllm.batch.slots import Sizes, slot_shapes
from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError
from jaxllm.common.hardware import format_bytes, nbytes, usable_memory
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.sharding import row_shards, use_mesh

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted bytes of a pool of slots, per device."""

    weights: int
    cache: int
    """State of all slots: KV cache, sequences and settings."""
    activations: int
    """Working memory of the compiled programs; 0 if the weights alone do not fit."""
    budget: int
    slots: int
    """Number of slots on all devices together."""
    capacity: int
    devices: int = 1

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

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


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Tasks of one pool of slots."""

    tasks: list[Task]
    sizes: Sizes
    memory: Prediction
    fitting: Sizes | None
    """`sizes`, or those of shorter sequences that would fit, or None."""


def plans(
    model: Decoder,
    group: Group,
    slots: int,
    budget: int,
    mesh: Mesh | None,
) -> Iterator[PoolPlan]:
    """One pool for all tasks of a group if memory allows `slots` slots of the longest; else the
    longest have a pool of their own, with fewer slots, and so on with the rest.

    If even the fewest slots do not fit, the plan's `memory.fits` is False.
    """
    shards = row_shards(mesh)
    options = (model.is_encoder_decoder, shards, group.beams)
    predict_for = partial(predict, model, group, budget, mesh)
    # Largest slots first.
    by_capacity: dict[tuple[int, int], list[Task]] = {}
    for task in group.tasks():
        own = sizes_for([task], 1, *options)
        by_capacity.setdefault((own.capacity, own.encoder_columns or 0), []).append(task)
    classes = [by_capacity[capacity] for capacity in sorted(by_capacity, reverse=True)]
    while classes:
        pool = [task for tasks in classes for task in tasks]
        sizes = sizes_for(pool, slots, *options)
        memory = fitting_slots(partial(predict_for, pool, sizes), sizes.slots, shards)
        if memory.slots < sizes.slots and len(classes) > 1:
            pool = classes.pop(0)
            sizes = sizes_for(pool, slots, *options)
            memory = fitting_slots(partial(predict_for, pool, sizes), sizes.slots, shards)
        else:
            classes = []
        if not memory.fits:  # the error of its rows states all bytes
            memory = predict_for(pool, sizes, memory.slots, compile_always=True)
        sizes = fitting = dataclasses.replace(sizes, slots=memory.slots)
        if not memory.fits:
            prompt_length = max(len(task.row.decoder_prompt) for task in pool)
            fitting = sizes.with_half_the_new_tokens(prompt_length)
            while fitting is not None and not predict_for(pool, fitting, sizes.shards).fits:
                fitting = fitting.with_half_the_new_tokens(prompt_length)
        yield PoolPlan(pool, sizes, memory, fitting)


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
    prediction = Prediction(
        weights=nbytes(model),
        cache=nbytes(shapes),
        activations=0,
        budget=budget,
        slots=slots,
        capacity=sizes.capacity,
        devices=1 if mesh is None else mesh.size,
    )
    if not prediction.fits and not (compile_always and prediction.weights < budget):
        return prediction
    with use_mesh(mesh):
        programs = slot_prefill(model, shapes, rows, sizes), slot_decode(model, shapes)
        activations = max(
            working_memory(program.lower().compile(), prediction.cache) for program in programs
        )
    return dataclasses.replace(prediction, activations=activations)


def too_large_error(task: Task, plan: PoolPlan) -> InputError:
    """The error of a task that cannot run, with the number to change."""
    memory, row = plan.memory, task.row
    if memory.weights >= memory.budget:
        return InputError(
            f"memory: the weights alone take {format_bytes(memory.weights)} of a budget of "
            f"{format_bytes(memory.budget)}; raise memory, or load the model in a smaller dtype"
        )
    needed = (
        f"one slot of {memory.capacity} columns ({_lengths(row)}) takes "
        f"{format_bytes(memory.total)}, but the budget is {format_bytes(memory.budget)}"
    )
    possible = 0 if plan.fitting is None else plan.fitting.max_new_tokens(len(row.decoder_prompt))
    if possible >= 1:
        return InputError(f"max_new_tokens: {needed}; ask for at most {possible}, or raise memory")
    return InputError(f"memory: {needed}; shorten the prompt, or raise memory")


def out_of_memory_error(task: Task, sizes: Sizes) -> InputError:
    """The error of a task for which memory ran out although it was predicted to fit."""
    return InputError(
        f"max_new_tokens: the device ran out of memory with a single slot of {sizes.capacity} "
        f"columns ({_lengths(task.row)}); ask for fewer"
    )


def _lengths(row: BatchRow) -> str:
    beams = f" for each of {row.config.num_beams} beams" if row.config.num_beams > 1 else ""
    return f"a prompt of {len(row.input_ids)} tokens, {row.max_new_tokens} new ones{beams}"
