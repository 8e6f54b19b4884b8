"""The driver: one prefill program, and one while_loop that every token-by-token strategy runs in.

The trip limit is traced, so that one compiled loop serves a whole `generate()` and each chunk of
`stream()`. On a GPU XLA copies a while loop's predicate to the host at every iteration unless it
knows the trip count; `inner` then puts a loop of a fixed number of steps inside (with no effect on
the result, only on how late an end is noticed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from jaxllm.generation.sample import emit
from jaxllm.generation.state import Settings, State

S = TypeVar("S")


def drive(
    step: Callable[[S], S], alive: Callable[[S], Bool[Array, ""]], state: S, inner: int = 1
) -> S:
    """Steps while `alive`; a step of a state that is not alive must change nothing."""
    body = step if inner == 1 else lambda s: jax.lax.fori_loop(0, inner, lambda _, s: step(s), s)
    return jax.lax.while_loop(alive, body, state)


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
    record = jnp.zeros((room, *logits.shape), logits.dtype)
    state = state.replace(
        scores=record if settings.keep_scores else None,
        logits=record if settings.keep_logits else None,
    )
    return emit(state, logits, settings)


def decode(
    model: Any, state: State, settings: Settings, until: Int[Array, ""], *, inner: int = 1
) -> State:
    """Generates until every row has ended or `until` columns are in use."""

    def alive(state: State) -> Bool[Array, ""]:
        return (state.cur_len < until) & ~state.done.all()

    def step(state: State) -> State:
        live = ~state.done[:, None]
        logits, cache = model.decode(state.token[:, None], live, state.cache)
        return emit(state.replace(cache=cache), logits[:, 0], settings)

    def guarded(state: State) -> State:
        return jax.lax.cond(alive(state), step, lambda s: s, state)

    return drive(step if inner == 1 else guarded, alive, state, inner)


prefill_program = jax.jit(prefill, static_argnames=("capacity", "room"))
# The state is donated: cache and sequences are updated in the buffers that prefill made.
decode_program = jax.jit(decode, static_argnames=("inner",), donate_argnames=("state",))
