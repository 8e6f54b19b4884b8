"""The compiled programs over slots: they prefill prompts into slots, and decode all slots.

A prompt is prefilled as a whole, or in chunks after a prefix of an earlier prompt, as
`jaxllm.serve` does. The chunks fill a prompt cache, of one row, whose column j is cache slot j. It
is a value: extending it makes another one, so a kept prefix serves any number of prompts. The last
chunk of a prompt goes into a slot.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Int

from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import (
    PrefillBatch,
    RotatedCache,
    RowSettings,
    Sizes,
    SlotCache,
    Slots,
    place,
    with_shardings,
    write_rows,
)
from jaxllm.cache.kv_cache import KV, Cache, per_head
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.models.decoder import Decoder
from jaxllm.nn.platform.decoding import steps_between_checks, writes_one_slot
from jaxllm.parallel.field_axes import constrain_fields
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import constrain, use_mesh

T = TypeVar("T")


class DecodeProgress(NamedTuple):
    """Results of some decode steps, for the host."""

    outputs: Any
    """Output of `SlotStrategy.outputs`, such as `SlotOutputs`."""
    unfinished: Bool[Array, " B"]
    """True while the slot's row is not finished."""
    steps: Int[Array, ""]
    """Decode steps of this call."""
    busy_slot_steps: Int[Array, ""]
    """Slot-steps occupied by an unfinished row."""


def slot_shapes(
    model: Decoder,
    strategy: SlotStrategy,
    sizes: Sizes,
    settings: RowSettings,
    mesh: Mesh | AbstractMesh | None = None,
) -> Slots:
    """The shapes, dtypes and shardings of slots.

    Args:
        settings: settings of any rows of the group, as host arrays.
    """
    count = sizes.slots
    struct = jax.ShapeDtypeStruct
    arrays: dict[str, Any] = {
        "tokens": struct((count, 1), np.int32),
        "prompt_length": struct((count,), np.int32),
        "key_data": struct((count, 3), np.uint32),
    }
    repeated = jax.tree.map(lambda x: struct((count, *x.shape[1:]), x.dtype), settings)
    batch = PrefillBatch(**arrays, settings=repeated, encoder={})

    rotated = strategy.beams == 1 and writes_one_slot(platform_of_arrays(model))

    def initial_slots(model: Decoder, batch: PrefillBatch) -> Slots:
        encoder = {}
        if sizes.encoder_columns is not None:
            shape = (count, sizes.encoder_columns)
            encoder = {"input_ids": jnp.zeros(shape, jnp.int32)}
            encoder["attention_mask"] = jnp.zeros(shape, bool)
        cache = model.init_cache(count, sizes.capacity, **encoder)
        cache = RotatedCache.of(cache) if rotated else SlotCache.of(cache)
        return strategy.initial_slots(batch, cache, sizes)

    with use_mesh(mesh):
        shapes = jax.eval_shape(initial_slots, model, batch)
    return with_shardings(shapes, mesh, count)


def prompt_cache_shapes(model: Decoder, columns: int, mesh: Mesh | None) -> Cache:
    """Shapes, dtypes and shardings of a prompt cache."""
    with use_mesh(mesh):
        shapes = jax.eval_shape(partial(model.init_cache, 1, columns))
    return with_shardings(shapes, mesh, 1)


def empty_arrays(shapes: T) -> T:
    """Arrays of zeros of these shapes, made without compiling a program."""
    return jax.tree.map(lambda x: place(np.zeros(x.shape, x.dtype), x.sharding), shapes)


def empty_slots(shapes: Slots, settings: RowSettings) -> Slots:
    """Slots without rows, made without compiling a program. The `reason` 0 is not `RUNNING`.

    Args:
        settings: settings of one row, [1], which free slots get. (With zeros a filter would take
            its slow branch.)
    """

    def repeated(shape: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
        return place(np.repeat(value, shape.shape[0], axis=0), shape.sharding)

    return Slots(
        state=empty_arrays(shapes.state),
        settings=jax.tree.map(repeated, shapes.settings, settings),
    )


# The slots are donated: cache and sequences are updated in place.
@partial(jax.jit, static_argnames=("strategy", "sizes"), donate_argnames=("slots",))
def prefill_slots(
    model: Decoder,
    slots: Slots,
    batch: PrefillBatch,
    slot_ids: Int[Array, " R"],
    stops: StoppingCriteriaList,
    *,
    strategy: SlotStrategy,
    sizes: Sizes,
) -> Slots:
    """Prefills R prompts of one bucket, chooses their first tokens, and writes them into slots.

    Args:
        slot_ids: the slot of each prompt; for prompts that only fill up the batch, the number of
            slots, which is no slot.
    """
    batch = constrain(batch, "rows")
    rows, width = batch.tokens.shape
    init_cache = partial(model.init_cache, rows, **batch.encoder)
    cache = slots.state.cache.for_prompts(init_cache, width, jnp.asarray(batch.prompt_length))
    return write_rows(slots, strategy.prefill(model, batch, cache, stops, sizes), slot_ids)


@partial(jax.jit, static_argnames=("strategy", "steps_per_check"), donate_argnames=("slots",))
def decode_slots(
    model: Decoder,
    slots: Slots,
    stops: StoppingCriteriaList,
    free_slots: Int[Array, ""],
    max_steps: Int[Array, ""],
    *,
    strategy: SlotStrategy,
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
        return strategy.step(model, slots, stops), steps + 1, busy_slot_steps

    def several_steps(carry: tuple[Slots, Array, Array]) -> tuple[Slots, Array, Array]:
        return jax.lax.fori_loop(0, steps_per_check, lambda _, carry: step(carry), carry)

    zero = jnp.int32(0)
    body = step if steps_per_check == 1 else several_steps
    slots, *counts = jax.lax.while_loop(continues, body, (slots, zero, zero))
    slots = constrain_fields(slots, batch=slots.count)
    return slots, DecodeProgress(strategy.outputs(slots), slots.unfinished, *counts)


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


@partial(jax.jit, static_argnames=("strategy", "sizes", "width"), donate_argnames=("slots",))
def prefill_rest(
    model: Decoder,
    slots: Slots,
    cache: Cache,
    start: Int[Array, ""],
    batch: PrefillBatch,
    slot_ids: Int[Array, " 1"],
    stops: StoppingCriteriaList,
    *,
    strategy: SlotStrategy,
    sizes: Sizes,
    width: int,
) -> tuple[Slots, Cache]:
    """Prefills the rest of a prompt, chooses its first token, and writes the row into a slot.

    Args:
        start: columns of the prompt that the cache has; start + width is at most its capacity.
        batch: the whole prompt, padded to `sizes.columns`.
        width: columns of the rest, padding included.

    Returns:
        The slots, and the cache of the prompt.
    """
    batch = constrain(batch, "rows")
    rows = strategy.prefill(model, batch, truncated(cache, start), stops, sizes, width)
    cache = rows.state.cache.replace(length=jnp.asarray(batch.prompt_length)[0])
    state = rows.state.replace(cache=slots.state.cache.rows_of(rows.state.cache))
    slots = write_rows(slots, Slots(state, rows.settings), slot_ids)
    return slots, constrain_fields(cache, batch=1)
