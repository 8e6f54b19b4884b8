"""Plans pools of slots that fit the memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.memory import Prediction, fitting_slots, nbytes, size, working_memory
from jaxllm.batch.programs import admit_program, decode_program
from jaxllm.batch.queue import Task
from jaxllm.batch.row_groups import Group, lay_out
from jaxllm.batch.rows import Row
from jaxllm.batch.sizes import Sizes, sizes_for
from jaxllm.batch.slot_placement import slot_shapes
from jaxllm.batch.slots import Arrivals, Slots
from jaxllm.common.errors import InputError
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.sharding import row_shards, use


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tasks of one pool of slots."""

    tasks: list[Task]
    sizes: Sizes
    memory: Prediction
    fitting: Sizes | None
    """`sizes`, or those of shorter sequences that would fit, or None."""


def plans(
    model: Decoder,
    tokenizer: Any,
    group: Group,
    tasks: Sequence[Task],
    slots: int,
    budget: int,
    mesh: Mesh | None,
) -> Iterator[Plan]:
    """One pool for all tasks if memory allows `slots` slots of the longest; else the longest have a
    pool of their own, with fewer slots, and so on with the rest.

    If even the fewest slots do not fit, the plan's `memory.fits` is False.
    """
    shards = row_shards(mesh)
    options = (model.is_encoder_decoder, shards, group.strategy.beams)
    predicted = partial(predict, model, tokenizer, group, budget, mesh)
    # Largest slots first.
    classes: dict[tuple[int, int], list[Task]] = {}
    for task in tasks:
        alone = sizes_for([task], 1, *options)
        classes.setdefault((alone.capacity, alone.source or 0), []).append(task)
    waiting = [classes[key] for key in sorted(classes, reverse=True)]
    while waiting:
        rest = [task for part in waiting for task in part]
        whole = sizes_for(rest, slots, *options)
        memory = fitting_slots(partial(predicted, rest, whole), whole.slots, shards)
        if memory.slots < whole.slots and len(waiting) > 1:
            rest = waiting.pop(0)
            whole = sizes_for(rest, slots, *options)
            memory = fitting_slots(partial(predicted, rest, whole), whole.slots, shards)
        else:
            waiting = []
        if not memory.fits:  # the error of its rows states all bytes
            memory = predicted(rest, whole, memory.slots, whole=True)
        sizes = dataclasses.replace(whole, slots=memory.slots)
        fitting = sizes if memory.fits else _shorter_that_fit(predicted, rest, sizes)
        yield Plan(rest, sizes, memory, fitting)


def _shorter_that_fit(predicted: Any, tasks: Sequence[Task], sizes: Sizes) -> Sizes | None:
    start = max(len(task.row.start) for task in tasks)
    shorter = sizes.shortened(start)
    while shorter is not None and not predicted(tasks, shorter, sizes.shards).fits:
        shorter = shorter.shortened(start)
    return shorter


def predict(
    model: Decoder,
    tokenizer: Any,
    group: Group,
    budget: int,
    mesh: Mesh | None,
    tasks: Sequence[Task],
    sizes: Sizes,
    slots: int,
    *,
    whole: bool = False,
) -> Prediction:
    """Predicts the memory of a pool with `slots` slots.

    Compiles its programs for the widest prompt bucket, unless weights and cache alone exceed the
    budget (`whole`: the weights alone). The pool reuses these compiled programs.
    """
    sizes = dataclasses.replace(sizes, slots=slots)
    widest = max(tasks, key=lambda task: task.width)
    arrivals = lay_out([widest], group, sizes, model.config.vocab_size)
    shapes = slot_shapes(model, group.strategy, sizes, arrivals.settings, mesh)
    found = Prediction(
        weights=nbytes(model),
        cache=nbytes(shapes),
        activations=0,
        budget=budget,
        slots=slots,
        capacity=sizes.capacity,
        devices=1 if mesh is None else mesh.size,
    )
    if not found.fits and not (whole and found.weights < budget):
        return found
    stops = group.criteria(tokenizer, mesh)
    with use(mesh):
        programs = traced_programs(model, shapes, arrivals, stops, group, sizes)
        working = max(
            working_memory(program.lower().compile(), found.cache) for program in programs
        )
    return dataclasses.replace(found, activations=working)


def traced_programs(
    model: Decoder,
    shapes: Slots,
    arrivals: Arrivals,
    stops: StoppingCriteriaList,
    group: Group,
    sizes: Sizes,
) -> tuple[jax.stages.Traced, jax.stages.Traced]:
    """The programs `admit` and `decode` of a pool, traced; runs in `use(mesh)`.

    Args:
        shapes: the slots, as `slot_shapes` returns them.
    """
    strategy = group.strategy
    at, number = np.zeros(sizes.arrivals, np.int32), np.int32(1)
    return (
        admit_program.trace(model, shapes, arrivals, at, stops, strategy=strategy, sizes=sizes),
        decode_program.trace(model, shapes, stops, number, number, strategy=strategy),
    )


def too_large(task: Task, plan: Plan) -> InputError:
    """The error of a task that cannot run, with the number to change."""
    memory, row = plan.memory, task.row
    if memory.weights >= memory.budget:
        return InputError(
            f"memory: the weights alone take {size(memory.weights)} of a budget of "
            f"{size(memory.budget)}; raise memory, or load the model in a smaller dtype"
        )
    needed = (
        f"one slot of {memory.capacity} columns ({_lengths(row)}) takes {size(memory.total)}, but "
        f"the budget is {size(memory.budget)}"
    )
    new = 0 if plan.fitting is None else plan.fitting.max_new_tokens(len(row.start))
    if new < 1:
        return InputError(f"memory: {needed}; shorten the prompt, or raise memory")
    return InputError(f"max_new_tokens: {needed}; ask for at most {new}, or raise memory")


def ran_out(task: Task, sizes: Sizes) -> InputError:
    """The error of a task for which memory ran out although it was predicted to fit."""
    return InputError(
        f"max_new_tokens: the device ran out of memory with a single slot of {sizes.capacity} "
        f"columns ({_lengths(task.row)}); ask for fewer"
    )


def _lengths(row: Row) -> str:
    beams = f" for each of {row.config.num_beams} beams" if row.config.num_beams > 1 else ""
    return f"a prompt of {len(row.ids)} tokens, {row.max_new_tokens} new ones{beams}"
