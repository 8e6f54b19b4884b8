"""One text a slot: greedy search and sampling."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slots import Arrivals, RowSettings, SlotOutputs, Slots
from jaxllm.cache.kv_cache import Cache, put_columns
from jaxllm.generation.processors.per_row import row_by_row
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.generation.stopping.per_row import watched
from jaxllm.generation.strategies.strategy import NEVER, nonfinite
from jaxllm.generation.strategies.token_choice import choose_greedy, choose_sample
from jaxllm.models.outputs import DecodeOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SingleSlots(Slots):
    """A text in each slot."""

    tokens: Int[Array, "B L"]
    start: Int[Array, " B"]
    length: Int[Array, " B"]
    live: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    first_nonfinite_step: Int[Array, " B"]
    keys: UInt32[Array, "B K"]
    """Data of the random keys; new token t is drawn with fold_in(key, t)."""
    settings: RowSettings
    cache: Cache

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Single:
    """The strategy of rows that are each one text, greedy or (some of them) sampled."""

    sampling: bool

    @property
    def beams(self) -> int:
        return 1

    def blank(self, arrivals: Arrivals, cache: Cache, sizes: Sizes) -> SingleSlots:
        rows, width = arrivals.tokens.shape
        return SingleSlots(
            tokens=jnp.pad(arrivals.tokens, ((0, 0), (0, sizes.columns - width))),
            start=jnp.asarray(arrivals.start),
            length=jnp.asarray(arrivals.start),
            live=jnp.ones(rows, bool),
            stopped=jnp.zeros(rows, bool),
            first_nonfinite_step=jnp.full(rows, NEVER, jnp.int32),
            keys=jax.random.key_data(arrivals.keys()),
            settings=arrivals.settings,
            cache=cache,
        )

    def first(
        self, arrivals: Arrivals, read: DecodeOutput, stops: StoppingCriteriaList, sizes: Sizes
    ) -> SingleSlots:
        slots = self.blank(arrivals, read.cache, sizes)
        return self.choose(slots, read.logits[:, 0], stops)

    def step(self, model: Any, slots: SingleSlots, stops: StoppingCriteriaList) -> SingleSlots:
        last = jnp.maximum(slots.length - 1, 0)[:, None]
        newest = jnp.take_along_axis(slots.tokens, last, axis=1)
        read = model.decode(newest, slots.live[:, None], slots.cache)
        slots = self.choose(slots, read.logits[:, 0], stops)
        length = jnp.where(slots.live, slots.length - 1, 0)
        return slots.replace(cache=read.cache.replace(length=length))

    def choose(
        self, slots: SingleSlots, logits: Float[Array, "B V"], stops: StoppingCriteriaList
    ) -> SingleSlots:
        """From logits to the next token of each live row, and to which rows end with it."""
        settings, live, columns = slots.settings, slots.live, slots.tokens.shape[1]
        scores = row_by_row(settings.processors)(slots.tokens, logits, slots.length)
        step = slots.length - slots.start
        token = choose_greedy(scores)
        if self.sampling:
            keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(slots.keys), step)
            token = jnp.where(settings.sampled, choose_sample(keys, scores), token)
        broken = nonfinite(logits, scores) & live & ~settings.allow_nonfinite
        at = jnp.where(live, slots.length, columns)
        tokens = put_columns(slots.tokens, token[:, None], at[:, None])
        length = slots.length + live
        stopped = watched(stops, settings.watched)(tokens, scores, length)
        ends = jnp.any(token[:, None] == settings.eos, axis=1)
        over = ends | stopped | broken | (length >= settings.limit)
        return slots.replace(
            tokens=tokens,
            length=length,
            live=live & ~over,
            stopped=jnp.where(live, stopped & ~ends, slots.stopped),
            first_nonfinite_step=jnp.where(
                broken & (slots.first_nonfinite_step == NEVER), step, slots.first_nonfinite_step
            ),
        )

    def texts(self, slots: SingleSlots) -> SlotOutputs:
        return SlotOutputs(
            tokens=slots.tokens[:, None],
            start=slots.start,
            length=slots.length[:, None],
            stopped=slots.stopped[:, None],
            first_nonfinite_step=slots.first_nonfinite_step,
        )
