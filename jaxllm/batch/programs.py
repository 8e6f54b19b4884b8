"""The two compiled programs: one prefills prompts into slots, the other decodes all slots."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import write_rows
from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import PrefillBatch, Slots
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.models.decoder import Decoder
from jaxllm.nn.platform.decoding import steps_between_checks
from jaxllm.parallel.field_axes import constrain_fields
from jaxllm.parallel.sharding import constrain


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


# The slots are donated: cache and sequences are updated in place.
prefill_slots_program = jax.jit(
    prefill_slots, static_argnames=("strategy", "sizes"), donate_argnames=("slots",)
)
decode_slots_program = jax.jit(
    decode_slots, static_argnames=("strategy", "steps_per_check"), donate_argnames=("slots",)
)
