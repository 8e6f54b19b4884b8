"""KV caches of single prompts: prefill in chunks, or after a prefix of an earlier prompt.

A prompt cache has one row, whose column j is cache slot j. It is a value: extending it makes
another one, so a kept prefix serves any number of prompts. The last chunk of a prompt goes into a
slot. `jaxllm.serve` uses them; the rows of a batch are prefilled as a whole.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import place, with_shardings, write_rows
from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import PrefillBatch, Slots
from jaxllm.cache.kv_cache import KV, Cache, per_head
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.field_axes import constrain_fields
from jaxllm.parallel.sharding import constrain, use_mesh


def prompt_cache_shapes(model: Decoder, columns: int, mesh: Mesh | None) -> Cache:
    """Shapes, dtypes and shardings of a prompt cache."""
    with use_mesh(mesh):
        shapes = jax.eval_shape(partial(model.init_cache, 1, columns))
    return with_shardings(shapes, mesh, 1)


def empty_prompt_cache(shapes: Cache) -> Cache:
    """A prompt cache without tokens, made without compiling a program."""
    return jax.tree.map(lambda x: place(np.zeros(x.shape, x.dtype), x.sharding), shapes)


def truncated(cache: Cache, length: Int[Array, ""]) -> Cache:
    """The first `length` columns of a prompt cache. Keys and values of the others become 0, since a
    NaN there would pass the mask (0 * NaN is NaN)."""
    cache = cache.truncate(length[None])

    def zero_masked(kv: KV) -> KV:
        return jax.tree.map(lambda x: jnp.where(per_head(cache.mask, x)[..., None], x, 0), kv)

    return cache.replace(length=length, layers=tuple(map(zero_masked, cache.layers)))


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
    slots = write_rows(slots, Slots(state, rows.unfinished, rows.settings), slot_ids)
    return slots, constrain_fields(cache, batch=1)


# Prompt caches are not donated: they may be kept prefixes.
extend_prompt_program = jax.jit(extend_prompt)
prefill_rest_program = jax.jit(
    prefill_rest, static_argnames=("strategy", "sizes", "width"), donate_argnames=("slots",)
)
