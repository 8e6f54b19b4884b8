"""The compiled programs of `generate` and of batch slots, traced for a model without weights.

`programs` is the only name of generation and of batches that planning imports. The memory of a pool
is predicted from the same programs of its slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxllm.batch.prompt_chunks import (
    PromptColumns,
    StagedRows,
    prefill_chunk,
    staged_shapes,
    start_rows,
    with_chunks_of_a_job,
)
from jaxllm.batch.row_groups import fits_slots, groups, prefill_batch, sizes_for
from jaxllm.batch.rows import RawRow, RowReader
from jaxllm.batch.slots import PromptRows, Sizes, Slots, decode_slots, prefill_slots, slot_shapes
from jaxllm.common.errors import UnsupportedError
from jaxllm.common.hardware import default_device
from jaxllm.generation.call.prepare import prepare_call
from jaxllm.generation.generate import decode_arguments, run_prefill
from jaxllm.generation.loop import decode_program, prefill_program
from jaxllm.models.decoder import Decoder, FlatModel
from jaxllm.nn.platform.decoding import steps_between_checks
from jaxllm.parallel.field_axes import field_shardings
from jaxllm.parallel.placement import platform_of_arrays, put_shapes, shapes_of
from jaxllm.parallel.sharding import row_shards, use_devices

GREEDY = {"do_sample": False, "num_beams": 1}


class Program(NamedTuple):
    """A program for rows of one length."""

    name: str
    """`decode` or `prefill` of `generate`, `batch.decode` or `batch.prefill` of slots."""
    trace: Callable[[], jax.stages.Traced]
    """Traces the program; call it inside `use_devices`."""
    state: Any
    """State of the rows, or the slots: shapes with shardings."""
    cache: Any
    """The KV cache in `state`."""
    rows: int
    """Rows of a decode step, or prompts of a prefill."""
    tokens: int
    """Tokens of a decode step or a prefill."""
    loops: int
    """Loops that the program has."""
    position: int = 0
    """Index of the model's first leaf among the leaves of the arguments."""
    beside: Any = ()
    """Other arrays that stay on the devices while it runs: shapes with shardings."""


def programs(
    model: Any,
    mesh: Mesh | AbstractMesh | None,
    device: Any,
    *,
    rows: int,
    prompt: int,
    new: int,
    in_slots: bool,
    fields: Mapping[str, Any],
) -> tuple[Program, Program]:
    """The programs that decode and prefill, before they are traced.

    Args:
        model: shapes with shardings, and a card.
        mesh: the mesh of the rows; programs of an abstract one cannot be traced.
        device: the device of all arrays without a mesh; None: JAX's default one.
        rows: number of rows, or of slots.
        prompt: tokens of a prompt.
        new: new tokens of a row.
        in_slots: True: the programs of batch slots; False: the programs of `generate`.
        fields: further generation fields; without any, greedy search.

    Raises:
        InputError, UnsupportedError: as `generate` and `BatchGenerator` for such rows.
    """
    fields = {**GREEDY, **fields, "max_new_tokens": new}
    make = _of_slots if in_slots else _of_generate
    return make(model, mesh, device or default_device(), rows, prompt, fields)


def _of_generate(
    model: Any, mesh: Any, device: Any, rows: int, prompt: int, fields: Mapping[str, Any]
) -> tuple[Program, Program]:
    ids = np.zeros((rows, prompt), np.int32)
    # Without shardings, since a call is prepared on the host.
    unplaced = shapes_of(model).with_card(model.card)
    call = prepare_call(unplaced, ids, np.ones_like(ids), None, 0, fields)
    place = shapes_of if mesh is not None else partial(put_shapes, mesh=None, device=device)
    call = dataclasses.replace(
        call,
        model=FlatModel.of(model),
        inputs=place(call.inputs),
        settings=place(call.settings),
        strategy=place(call.strategy),
    )
    call = call if mesh is None else call.on_mesh(mesh)
    with use_devices(mesh, device):
        state = run_prefill(call, prefill_program.eval_shape)
    batch = state.cache.mask.shape[0]
    shardings = None if mesh is None else field_shardings(state, mesh, batch=batch)
    state = put_shapes(state, mesh, device, shardings)
    *arguments, steps = decode_arguments(call, state, call.request.max_length)
    decode = partial(decode_program.trace, *arguments, steps)
    prefill = partial(run_prefill, call, prefill_program.trace)
    position = len(jax.tree.leaves(call.strategy))
    return (
        Program("decode", decode, state, state.cache, rows, rows, 1 + (steps > 1), position),
        Program("prefill", prefill, state, state.cache, rows, rows * prompt, 0, position),
    )


def _of_slots(
    model: Any, mesh: Any, device: Any, rows: int, prompt: int, fields: Mapping[str, Any]
) -> tuple[Program, Program]:
    row = RowReader(model, None, fields, seed=0).read(RawRow(0, 0, {"input_ids": [0] * prompt}))
    if not fits_slots(row):
        given = {name for name, value in fields.items() if GREEDY.get(name) != value}
        names = ", ".join(sorted(given - {"max_new_tokens"}))
        raise UnsupportedError(
            f"batch: rows with these settings ({names}) have no slots, and run in calls of "
            "generate; plan decode and prefill"
        )
    (group,) = groups([row], model.config.vocab_size)
    (task,) = group.tasks()[:1]
    sizes = sizes_for([task], 1, model.is_encoder_decoder, row_shards(mesh), group.beams)
    sizes = with_chunks_of_a_job(sizes.with_slots(rows), model)
    # The shapes may be of so many slots that a prefill's prompts do not fit this machine.
    one_row = prefill_batch([task], group, dataclasses.replace(sizes, slots=1))
    slots = slot_shapes(model, one_row, sizes, mesh)
    staged = staged_shapes(model, sizes, mesh) if sizes.wide else None
    if mesh is None:
        slots, staged = put_shapes((slots, staged), mesh, device)
    cache, loops = slots.state.cache, 1 + (steps_between_checks(platform_of_arrays(model)) > 1)
    decode, count = partial(slot_decode, model, slots), sizes.slots
    step = Program("batch.decode", decode, slots, cache, count, count, loops, beside=staged)
    if staged is not None:
        chunk, (prompts, width) = partial(chunk_prefill, model, staged, sizes), sizes.chunks[0]
        numbers = prompts, prompts * width, 0
        return step, Program("batch.prefill", chunk, staged, staged.cache, *numbers, beside=slots)

    def prefill() -> jax.stages.Traced:
        return slot_prefill(model, slots, prefill_batch([task], group, sizes), sizes)

    prompts = sizes.prefill_rows
    return step, Program("batch.prefill", prefill, slots, cache, prompts, prompts * prompt, 0)


def slot_prefill(model: Decoder, slots: Slots, rows: PromptRows, sizes: Sizes) -> jax.stages.Traced:
    """The program that prefills rows into slots of these shapes, traced."""
    slot_ids, bucket = np.zeros(sizes.prefill_rows, np.int32), sizes.new_token_bucket
    return prefill_slots.trace(FlatModel.of(model), slots, rows, slot_ids, new_token_bucket=bucket)


def chunk_prefill(model: Decoder, staged: StagedRows, sizes: Sizes) -> jax.stages.Traced:
    """The program that prefills a wide chunk of prompts in rows of these shapes, traced."""
    return prefill_chunk.trace(FlatModel.of(model), staged, PromptColumns.empty(*sizes.chunks[0]))


def slot_start(
    model: Decoder, slots: Slots, staged: StagedRows, rows: PromptRows, sizes: Sizes
) -> jax.stages.Traced:
    """The program that puts prompts after their last chunk into slots of these shapes, traced."""
    slot_ids, bucket = np.zeros(sizes.prefill_rows, np.int32), sizes.new_token_bucket
    return start_rows.trace(
        FlatModel.of(model), slots, staged, rows, slot_ids, new_token_bucket=bucket
    )


def slot_decode(model: Decoder, slots: Slots) -> jax.stages.Traced:
    """The program that decodes slots of these shapes, traced."""
    is_free, number = np.zeros(slots.count, bool), np.int32(1)
    steps = steps_between_checks(platform_of_arrays(model))
    return decode_slots.trace(
        FlatModel.of(model), slots, is_free, number, number, steps_per_check=steps
    )
