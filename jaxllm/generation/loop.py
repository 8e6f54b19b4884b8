"""The two compiled programs of a generation: prefill, and one while_loop over the new tokens.

The loop's limit is traced, so that one compiled program serves a whole `generate()` and each chunk
of `stream()`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from jaxllm.generation.sample import emit
from jaxllm.generation.state import Settings, State


def prefill(
    model: Any,
    prompt: dict[str, Any],
    encoder: dict[str, Any],
    sequences: Int[Array, "B L"],
    mask: Bool[Array, "B L"],
    start_len: Int[Array, ""],
    at: Int[Array, " B"],
    columns: Int[Array, ""],
    keys: Key[Array, " Bn"],
    settings: Settings,
    *,
    capacity: int,
    room: int,
) -> State:
    """Runs the prompt once, and chooses the first token of each of its n samples.

    Args:
        prompt: `tokens` [B, T] or `inputs_embeds` [B, T, D], `mask` [B, T], and `token_type_ids`.
        encoder: what `model.start` takes.
        sequences, mask: the buffers that the result grows in.
        start_len: columns of `sequences` in use.
        at: the column of the prompt that holds each row's last real token.
        columns: how many columns of the prompt are not bucket padding; new tokens overwrite that.
        keys: a key per sample, n * B of them.
        capacity: columns of the cache.
        room: new tokens that records of scores or logits have room for.
    """
    batch, samples = sequences.shape[0], keys.shape[0] // sequences.shape[0]
    cache = model.start(batch, capacity, **encoder)
    logits, cache = model.decode(cache=cache, fresh=True, at=at, **prompt)
    cache = cache.replace(length=columns)
    state = State.start(
        jnp.repeat(sequences, samples, axis=0),
        jnp.repeat(mask, samples, axis=0),
        start_len,
        keys,
        cache.repeat(samples),
    )
    logits = jnp.repeat(logits[:, 0], samples, axis=0)
    if settings.keep_scores:
        state = state.replace(scores=jnp.zeros((room, *logits.shape), logits.dtype))
    if settings.keep_logits:
        state = state.replace(logits=jnp.zeros((room, *logits.shape), logits.dtype))
    return emit(state, logits, settings)


def decode(model: Any, state: State, settings: Settings, until: Int[Array, ""]) -> State:
    """Generates until every row has ended or `until` columns are in use."""

    def alive(state: State) -> Bool[Array, ""]:
        return (state.cur_len < until) & ~state.done.all()

    def step(state: State) -> State:
        live = ~state.done[:, None]
        logits, cache = model.decode(state.token[:, None], live, state.cache)
        return emit(state.replace(cache=cache), logits[:, 0], settings)

    return jax.lax.while_loop(alive, step, state)


prefill_program = jax.jit(prefill, static_argnames=("capacity", "room"))
# The state is donated: cache and sequences are updated in the buffers that prefill made.
decode_program = jax.jit(decode, donate_argnames=("state",))
