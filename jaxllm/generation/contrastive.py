"""Contrastive search: of the k likeliest tokens the one that repeats the context least."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache import Branches, Cache, per_head, put_columns
from jaxllm.generation import sample
from jaxllm.generation.strategy import Result, Settings, Strategy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State(sample.State):
    """Here the newest token is in the cache already, and the model has been asked what follows."""

    next_logits: Float[Array, "B V"]
    """Of the token to choose."""
    next_unconditional: Float[Array, "B V"] | None
    directions: Float[Array, "B S D"]
    """Last hidden states as unit vectors, in the slots of the cache."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrastive(Strategy[State]):
    """Su et al., "A Contrastive Framework for Neural Text Generation",
    https://arxiv.org/abs/2202.06417, as transformers 4.55.4 does it (`_contrastive_search`).

    The k best tokens go through the model in one call, as alternatives at the next position. A
    candidate's score is ``(1 - alpha) * p - alpha * s``, with s the largest cosine between its last
    hidden state and those of the context. What the model said of the chosen candidate is kept, so
    that a token costs one call of width k.
    """

    alpha: Float[Array, ""]
    k: int = dataclasses.field(metadata={"static": True})

    def slots(self, new):
        return new + self.k - 1

    def init(self, model, prompt, read, settings, room) -> State:
        logits = read.logits[:, 0]
        first = sample.first_state(prompt, read.cache, 1)
        first = sample.with_records(first, logits, settings, room)
        context = unit(read.last_hidden_state)
        free = read.cache.capacity - context.shape[1]
        # The first token is the loop's, like the others: its candidates need the model as well.
        return State(
            **vars(first),
            next_logits=logits,
            next_unconditional=sample.unconditional(read),
            directions=jnp.pad(context, ((0, 0), (0, free), (0, 0))),
        )

    def step(self, model, state, settings) -> State:
        scores = settings.processors(
            state.sequences,
            state.next_logits,
            state.cur_len,
            mask=state.mask,
            prompt_len=state.cur_len - state.step,
            unconditional_logits=state.next_unconditional,
        )
        best, tokens = jax.lax.top_k(scores, self.k)
        tokens = tokens.astype(jnp.int32)
        read = model.decode(
            tokens,
            jnp.broadcast_to(~state.done[:, None], tokens.shape),
            state.cache,
            branches=alternatives(state.cache, *tokens.shape),
        )
        directions = unit(read.last_hidden_state)
        known = state.cache.mask[: tokens.shape[0]]
        similarity = nearest(known, state.directions, directions)
        probability = jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
        value = (1 - self.alpha) * probability - self.alpha * similarity
        # A forbidden token is no candidate, however little it repeats.
        chosen = jnp.argmax(jnp.where(jnp.isneginf(best), -jnp.inf, value), axis=-1)

        new = pick(directions, chosen)[:, None]
        written = sample.append(state, pick(tokens, chosen), state.next_logits, scores, settings)
        return written.replace(
            next_logits=pick(read.logits, chosen),
            next_unconditional=jax.tree.map(lambda x: pick(x, chosen), read.unconditional_logits),
            directions=put_columns(state.directions, new, state.cache.length),
            cache=keep(read.cache, state.cache, chosen),
        )

    def finish(self, state: State, settings: Settings) -> Result:
        return sample.result(state)


def alternatives(cache: Cache, batch: int, k: int) -> Branches:
    """k candidates at the same column: each sees the context and itself."""
    slots = jnp.arange(cache.capacity, dtype=jnp.int32)
    own = cache.length + jnp.arange(k, dtype=jnp.int32)
    seen = (slots < cache.length) | (slots == own[:, None])
    return Branches(
        seen=jnp.broadcast_to(seen, (batch, k, cache.capacity)),
        columns=jnp.minimum(slots, cache.length),
    )


def keep(cache: Cache, before: Cache, chosen: Int[Array, " B"]) -> Cache:
    """The cache after the candidates with the chosen one alone: its column moves to the first."""
    rows, slot = cache.mask.shape[0], before.length
    # With guidance the unconditional rows lie below; they go on with the same tokens.
    chosen = jnp.tile(chosen.astype(jnp.int32), rows // chosen.shape[0])

    def move(x: Float[Array, "*BK S H"]) -> Float[Array, "*BK S H"]:
        at = slot + per_head(chosen, x)
        column = jnp.take_along_axis(x, jnp.expand_dims(at, (-2, -1)), axis=-2)
        return jax.lax.dynamic_update_slice_in_dim(x, column, slot, axis=x.ndim - 2)

    return cache.replace(
        layers=jax.tree.map(move, cache.layers),
        mask=cache.mask & (jnp.arange(cache.capacity) <= slot),
        length=slot + 1,
    )


def pick(x: Any, chosen: Int[Array, " B"]) -> Any:
    """Of [B, k, ...] each row's chosen entry, [B, ...]."""
    index = chosen.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, index, axis=1)[:, 0]


def unit(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """float32 vectors of length 1; zeros stay."""
    x = x.astype(jnp.float32)
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(norm > 0, norm, 1.0)


def nearest(
    known: Bool[Array, "B S"],
    context: Float[Array, "B S D"],
    candidates: Float[Array, "B k D"],
) -> Float[Array, "B k"]:
    """The largest cosine between each candidate and what is known of the context.

    >>> import jax.numpy as jnp
    >>> context = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    >>> nearest(jnp.array([[True, False]]), context, jnp.array([[[0.6, 0.8]]])).tolist()
    [[0.6000000238418579]]
    """
    cosines = jnp.einsum("bkd,bsd->bks", candidates, context, precision=jax.lax.Precision.HIGHEST)
    return jnp.max(jnp.where(known[:, None], cosines, -jnp.inf), axis=-1)
