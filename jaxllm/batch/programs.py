"""The two compiled programs: `admit` (prefill into slots) and `decode` (steps of all slots)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import put, settled
from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import Arrivals, SlotCache, SlotOutputs, Slots
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.parallel.sharding import constrain


class Seen(NamedTuple):
    """Outputs of a decode call that are copied to the host."""

    outputs: SlotOutputs
    live: Bool[Array, " B"]
    """True while the slot's row is not finished."""
    steps: Int[Array, ""]
    """Decode steps of this call."""
    busy: Int[Array, ""]
    """Slot-steps occupied by a live row."""


def admit(
    model: Any,
    slots: Slots,
    arrivals: Arrivals,
    at: Int[Array, " R"],
    stops: StoppingCriteriaList,
    *,
    strategy: SlotStrategy,
    sizes: Sizes,
) -> Slots:
    """Prefills R prompts of one bucket, chooses their first tokens and writes them into slots.

    Args:
        at: slot of each prompt; a number beyond the last slot drops it (padding of the batch).
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
    model: Any,
    slots: Slots,
    stops: StoppingCriteriaList,
    wanted: Int[Array, ""],
    most: Int[Array, ""],
    *,
    strategy: SlotStrategy,
) -> tuple[Slots, Seen]:
    """Decodes until `wanted` slots are free, no row is live, or `most` steps are done.

    `Seen` is a copy of the outputs, since the next call overwrites the slots and need not wait for
    the host.
    """

    def going(carry):
        slots, steps, _ = carry
        live = jnp.sum(slots.live)
        return (live > 0) & (slots.count - live < wanted) & (steps < most)

    def step(carry):
        slots, steps, busy = carry
        busy += jnp.sum(slots.live, dtype=jnp.int32)
        return strategy.step(model, slots, stops), steps + 1, busy

    slots, steps, busy = jax.lax.while_loop(going, step, (slots, jnp.int32(0), jnp.int32(0)))
    slots = settled(slots)
    return slots, Seen(strategy.outputs(slots), slots.live, steps, busy)


# The slots are donated: KV cache and sequences are updated in place.
admit_program = jax.jit(admit, static_argnames=("strategy", "sizes"), donate_argnames=("slots",))
decode_program = jax.jit(decode, static_argnames=("strategy",), donate_argnames=("slots",))
