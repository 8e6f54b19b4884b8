"""The compiled programs over slots: they prefill prompts into slots, and decode all slots.

A prompt is prefilled as a whole, or in chunks after a prefix of an earlier prompt, as
`jaxllm.serve` does. The chunks fill a prompt cache, of one row, whose column j is cache slot j. It
is a value: extending it makes another one, so a kept prefix serves any number of prompts. The last
chunk of a prompt goes into a slot.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Int

from jaxllm.batch.slots import PromptRows, Sizes, Slots, place, with_shardings, write_rows
from jaxllm.cache.kv_cache import KV, Cache, per_head
from jaxllm.cache.slot_cache import RotatedCache, SlotCache
from jaxllm.generation.loop import first_state
from jaxllm.generation.strategies.strategy import PrefillInputs, Result
from jaxllm.models.decoder import Decoder
from jaxllm.nn.platform.decoding import steps_between_checks, writes_one_slot
from jaxllm.parallel.field_axes import Axes, constrain_fields, map_with_axes
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import use_mesh

T = TypeVar("T")


class DecodeProgress(NamedTuple):
    """Results of some decode steps, for the host."""

    result: Result
    """Of all slots, whether their rows have ended or not."""
    unfinished: Bool[Array, " B"]
    """True while the slot's row is not finished."""
    steps: Int[Array, ""]
    """Decode steps of this call."""
    busy_slot_steps: Int[Array, ""]
    """Slot-steps occupied by an unfinished row."""


def slot_shapes(
    model: Decoder, rows: PromptRows, sizes: Sizes, mesh: Mesh | AbstractMesh | None = None
) -> Slots:
    """The shapes, dtypes and shardings of slots.

    Args:
        rows: any rows of the group.
    """
    count = sizes.slots

    def repeated(axes: Axes, x: Array | np.ndarray) -> jax.ShapeDtypeStruct:
        has_rows = "rows" in axes and x.ndim
        return jax.ShapeDtypeStruct((count, *x.shape[1:]) if has_rows else x.shape, x.dtype)

    one_slot = sizes.beams == 1 and writes_one_slot(platform_of_arrays(model))
    kind = RotatedCache if one_slot else SlotCache

    def initial_slots(model: Decoder, rows: PromptRows) -> Slots:
        encoder = {}
        if sizes.encoder_columns is not None:
            shape = (count, sizes.encoder_columns)
            encoder = {"input_ids": jnp.zeros(shape, jnp.int32)}
            encoder["attention_mask"] = jnp.zeros(shape, bool)
        cache = kind.of(model.init_cache(count, sizes.capacity, **encoder))
        inputs = rows.inputs.with_random_keys()
        return Slots.of(rows, rows.strategy.initial_state(inputs, cache, sizes.new_token_bucket))

    with use_mesh(mesh):
        shapes = jax.eval_shape(initial_slots, model, map_with_axes(repeated, rows))
    return with_shardings(shapes, mesh, count)


def prompt_cache_shapes(model: Decoder, columns: int, mesh: Mesh | None) -> Cache:
    """Shapes, dtypes and shardings of a prompt cache."""
    with use_mesh(mesh):
        shapes = jax.eval_shape(partial(model.init_cache, 1, columns))
    return with_shardings(shapes, mesh, 1)


def empty_arrays(shapes: T) -> T:
    """Arrays of zeros of these shapes, made without compiling a program."""
    return jax.tree.map(lambda x: place(np.zeros(x.shape, x.dtype), x.sharding), shapes)


def empty_slots(shapes: Slots, rows: PromptRows) -> Slots:
    """Slots without rows, made without compiling a program. The `reason` 0 is not `RUNNING`.

    Args:
        rows: free slots get the settings of the first one. (With zeros a filter would take its slow
            branch.)
    """

    def filled(axes: Axes, shape: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
        if "rows" in axes and shape.ndim:
            value = np.repeat(value[:1], shape.shape[0], axis=0)
        return place(value, shape.sharding)

    settings = map_with_axes(filled, shapes.settings, rows.settings)
    strategy = map_with_axes(filled, shapes.strategy, rows.strategy)
    return Slots(strategy, settings, empty_arrays(shapes.state))


def first_slots(
    model: Decoder,
    rows: PromptRows,
    inputs: PrefillInputs,
    cache: Cache,
    new_token_bucket: int,
) -> Slots:
    """Slots after the prompts and their first tokens."""
    state = first_state(
        rows.strategy, model, inputs, cache, rows.settings, new_token_bucket=new_token_bucket
    )
    return Slots.of(rows, state)


# The slots are donated: cache and sequences are updated in place.
@partial(jax.jit, static_argnames=("new_token_bucket",), donate_argnames=("slots",))
def prefill_slots(
    model: Decoder,
    slots: Slots,
    rows: PromptRows,
    slot_ids: Int[Array, " R"],
    *,
    new_token_bucket: int,
) -> Slots:
    """Prefills R prompts of one bucket, chooses their first tokens, and writes them into slots.

    Args:
        slot_ids: the slot of each prompt; for prompts that only fill up the batch, the number of
            slots, which is no slot.
        new_token_bucket: that of the slots' sizes.
    """
    rows = constrain_fields(rows, batch=len(slot_ids))
    inputs = rows.inputs.with_random_keys()
    init_cache = partial(model.init_cache, len(slot_ids), **inputs.encoder_inputs)
    width = inputs.decoder_inputs["tokens"].shape[1]
    cache = slots.state.cache.for_prompts(init_cache, width, jnp.asarray(inputs.start_len))
    return write_rows(slots, first_slots(model, rows, inputs, cache, new_token_bucket), slot_ids)


@partial(jax.jit, static_argnames=("steps_per_check",), donate_argnames=("slots",))
def decode_slots(
    model: Decoder,
    slots: Slots,
    free_slots: Int[Array, ""],
    max_steps: Int[Array, ""],
    *,
    steps_per_check: int = 1,
) -> tuple[Slots, DecodeProgress]:
    """Decodes until `free_slots` slots are free, all rows are finished, or for `max_steps` steps.

    Args:
        steps_per_check: steps between two checks of these conditions; see `steps_per_check_for`.

    The host reads a copy: the slots themselves are overwritten by the next call, which need not
    wait for the host.
    """

    def continues(carry: tuple[Slots, Array, Array]) -> Array:
        slots, steps, _ = carry
        busy_slots = jnp.sum(slots.unfinished)
        enough_busy = (busy_slots > 0) & (slots.count - busy_slots < free_slots)
        return enough_busy & (steps < max_steps)

    def step(carry: tuple[Slots, Array, Array]) -> tuple[Slots, Array, Array]:
        slots, steps, busy_slot_steps = carry
        busy_slot_steps += jnp.sum(slots.unfinished, dtype=jnp.int32)
        return slots.step(model), steps + 1, busy_slot_steps

    def several_steps(carry: tuple[Slots, Array, Array]) -> tuple[Slots, Array, Array]:
        return jax.lax.fori_loop(0, steps_per_check, lambda _, carry: step(carry), carry)

    zero = jnp.int32(0)
    body = step if steps_per_check == 1 else several_steps
    slots, *counts = jax.lax.while_loop(continues, body, (slots, zero, zero))
    slots = constrain_fields(slots, batch=slots.count)
    result = slots.strategy.finish(slots.state, slots.settings)
    return slots, DecodeProgress(result, slots.unfinished, *counts)


def steps_per_check_for(max_steps: int, platform: str) -> int:
    """Steps between two checks of `decode_slots` that suit the platform and divide `max_steps`.

    >>> [steps_per_check_for(steps, "gpu") for steps in (0, 1, 8)], steps_per_check_for(8, "cpu")
    ([4, 1, 4], 1)
    """
    steps = steps_between_checks(platform)
    return 1 if max_steps % steps else steps


def truncated(cache: Cache, length: Int[Array, ""]) -> Cache:
    """The first `length` columns of a prompt cache. Keys and values of the others become 0, since a
    NaN there would pass the mask (0 * NaN is NaN)."""
    cache = cache.truncate(length[None])

    def zero_masked(kv: KV) -> KV:
        return jax.tree.map(lambda x: jnp.where(per_head(cache.mask, x)[..., None], x, 0), kv)

    return cache.replace(length=length, layers=tuple(map(zero_masked, cache.layers)))


# Prompt caches are not donated: they may be kept prefixes.
@jax.jit
def extend_prompt(
    model: Decoder, cache: Cache, tokens: Int[Array, "1 T"], start: Int[Array, ""]
) -> Cache:
    """Prefills T more columns of a prompt after the first `start` ones of the cache.

    Args:
        start: start + T is at most the cache's capacity.
    """
    mask = jnp.ones(tokens.shape, bool)
    out = model.decode(tokens, mask, truncated(cache, start), logits_column=jnp.zeros(1, jnp.int32))
    return constrain_fields(out.cache, batch=1)


@partial(jax.jit, static_argnames=("width",), donate_argnames=("slots",))
def prefill_rest(
    model: Decoder,
    slots: Slots,
    cache: Cache,
    start: Int[Array, ""],
    rows: PromptRows,
    slot_ids: Int[Array, " 1"],
    *,
    width: int,
) -> tuple[Slots, Cache]:
    """Prefills the rest of a prompt, chooses its first token, and writes the row into a slot.

    Args:
        start: columns of the prompt that the cache has; start + width is at most its capacity.
        rows: the whole prompt, padded to the columns of a slot.
        width: columns of the rest, padding included.

    Returns:
        The slots, and the cache of the prompt.
    """
    rows = constrain_fields(rows, batch=1)
    cache = truncated(cache, start)
    inputs = rows.inputs.with_random_keys()

    def rest(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, cache.length, width, axis=1)

    inputs = dataclasses.replace(
        inputs,
        decoder_inputs={"tokens": rest(inputs.sequences), "mask": rest(inputs.mask)},
        last_column=inputs.last_column - cache.length,
        past_cache=cache,
    )
    new = first_slots(model, rows, inputs, cache, new_token_bucket=0)
    cache = new.state.cache.replace(length=jnp.asarray(rows.inputs.start_len)[0])
    state = new.state.replace(cache=slots.state.cache.rows_of(new.state.cache))
    slots = write_rows(slots, dataclasses.replace(new, state=state), slot_ids)
    return slots, constrain_fields(cache, batch=1)
