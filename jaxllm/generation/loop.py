"""The driver: prefill, one while_loop over the new tokens, and the end, for every strategy.

The loop's limit is traced, so that one compiled program serves a whole `generate()` and each chunk
of `stream()`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Int

from jaxllm.generation.strategies.strategy import DecodeSettings, Prompt, Result, Strategy
from jaxllm.parallel.field_axes import constrain_fields
from jaxllm.parallel.sharding import constrain


def prefill(
    strategy: Strategy[Any],
    model: Any,
    prompt: Prompt,
    settings: DecodeSettings,
    *,
    capacity: int,
    room: int,
) -> Any:
    """Runs the prompt once, or its new part on top of the past, and the strategy's first choice.

    Args:
        capacity: slots of the cache.
        room: most new tokens, a bucket.
    """
    wanted = settings.decode_options
    encoded = None
    if prompt.past is None:
        encoder, encoded = read_source(model, prompt.encoder, wanted)
        cache = prompt.kind.of(model.init_cache(prompt.mask.shape[0], capacity, **encoder))
    else:
        cache = prompt.past.compact(capacity)
    options = {**wanted, **strategy.read_options, "cache_is_empty": prompt.past is None}
    read = model.decode(cache=cache, logits_column=prompt.at, **prompt.inputs, **options)
    if encoded is not None:
        read = read.replace(
            encoder_hidden_states=encoded.hidden_states, encoder_attentions=encoded.attentions
        )
    # New tokens overwrite the columns that only fill the bucket.
    read = read.replace(cache=read.cache.replace(length=prompt.columns))
    return settled(strategy.init(model, prompt, read, settings, room))


def read_source(
    model: Any, encoder: dict[str, Any], wanted: dict[str, bool]
) -> tuple[dict[str, Any], Any]:
    """What `model.start` takes, with the encoder's output in it where its records are wanted."""
    if "attention_mask" not in encoder or "encoder_states" in encoder or not any(wanted.values()):
        return encoder, None
    inputs = dict(encoder)
    mask = inputs.pop("attention_mask")
    encoded = model.encode(inputs.pop("input_ids", None), mask, **inputs, **wanted)
    return {"encoder_states": encoded.x, "attention_mask": mask}, encoded


def decode(
    strategy: Strategy[Any], model: Any, state: Any, settings: DecodeSettings, until: Int[Array, ""]
) -> Any:
    """Generates until every row has ended or `until` columns are in use."""
    return settled(
        jax.lax.while_loop(
            lambda state: strategy.alive(state, until),
            lambda state: strategy.step(model, state, settings),
            state,
        )
    )


def settled(state: Any) -> Any:
    """The state, sharded on a mesh as every call gets it: one program serves the first and the
    next."""
    return constrain_fields(state, batch=state.cache.mask.shape[0])


def finish(strategy: Strategy[Any], state: Any, settings: DecodeSettings) -> Result:
    """The rows to return, of a state that may still be in the middle."""
    over = ~strategy.alive(state, settings.max_length)
    # On a mesh whole on every device: each process reads all of it.
    return constrain(dataclasses.replace(strategy.finish(state, settings), over=over))


prefill_program = jax.jit(prefill, static_argnames=("capacity", "room"))
# The state is donated: cache and sequences are updated in the buffers that prefill made.
decode_program = jax.jit(decode, donate_argnames=("state",))
finish_program = jax.jit(finish)
