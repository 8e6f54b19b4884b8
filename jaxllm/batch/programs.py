"""The two compiled programs: one prefills prompts into slots, the other decodes all slots."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import put
from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import Arrivals, SlotCache, SlotOutputs, Slots
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.field_axes import constrain_fields
from jaxllm.parallel.sharding import constrain


class DecodeProgress(NamedTuple):
    """Results of some decode steps, for the host."""

    outputs: SlotOutputs
    unfinished: Bool[Array, " B"]
    """True while the slot's row is not finished."""
    steps: Int[Array, ""]
    """Decode steps of this call."""
    busy: Int[Array, ""]
    """Slot-steps occupied by an unfinished row."""


def admit(
    model: Decoder,
    slots: Slots,
    arrivals: Arrivals,
    at: Int[Array, " R"],
    stops: StoppingCriteriaList,
    *,
    strategy: SlotStrategy,
    sizes: Sizes,
) -> Slots:
    """Prefills R prompts of one bucket, chooses their first tokens, and puts them into slots.

    Args:
        at: the slot of each prompt; the number of slots marks prompts that only fill up.
    """
    arrivals = constrain(arrivals, "rows")
    rows, width = arrivals.tokens.shape
    mask = jnp.arange(width) < arrivals.start[:, None]
    empty = SlotCache.of(model.init_cache(rows, width, **arrivals.encoder))
    out = model.decode(
        arrivals.tokens, mask, empty, cache_is_empty=True, logits_column=arrivals.start - 1
    )
    # New tokens overwrite the bucket's padding.
    out = out.replace(cache=out.cache.replace(length=arrivals.start))
    return put(slots, strategy.first(model, arrivals, out, stops, sizes), at)


def decode(
    model: Decoder,
    slots: Slots,
    stops: StoppingCriteriaList,
    free_slots: Int[Array, ""],
    max_steps: Int[Array, ""],
    *,
    strategy: SlotStrategy,
) -> tuple[Slots, DecodeProgress]:
    """Decodes until `free_slots` slots are free, all rows are finished, or for `max_steps` steps.

    The host reads a copy: the slots themselves are overwritten by the next call, which need not
    wait for the host.
    """

    def continues(carry):
        slots, steps, _ = carry
        busy_slots = jnp.sum(slots.unfinished)
        enough_busy = (busy_slots > 0) & (slots.count - busy_slots < free_slots)
        return enough_busy & (steps < max_steps)

    def step(carry):
        slots, steps, busy = carry
        busy += jnp.sum(slots.unfinished, dtype=jnp.int32)
        return strategy.step(model, slots, stops), steps + 1, busy

    slots, steps, busy = jax.lax.while_loop(continues, step, (slots, jnp.int32(0), jnp.int32(0)))
    slots = constrain_fields(slots, batch=slots.count)
    return slots, DecodeProgress(strategy.outputs(slots), slots.unfinished, steps, busy)


# The slots are donated: cache and sequences are updated in place.
admit_program = jax.jit(admit, static_argnames=("strategy", "sizes"), donate_argnames=("slots",))
decode_program = jax.jit(decode, static_argnames=("strategy",), donate_argnames=("slots",))
