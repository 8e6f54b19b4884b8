"""A group of beams a slot: beam search and beam sampling.

The search itself is that of `generate`: its state has a row for each slot, and every row counts its
steps by itself. The cache of a slot holds the prompt once, and then a column for each beam and step
(`BeamCache`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import of_layers
from jaxllm.batch.slots import Arrivals, RowSettings, SlotOutputs, Slots
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.processors.per_row import row_by_row
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.generation.stopping.per_row import watched
from jaxllm.generation.strategies.beam.beam_search import BeamSearch, BeamSearchState
from jaxllm.generation.strategies.strategy import DecodeSettings, Prompt
from jaxllm.models.outputs import DecodeOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamSlots(Slots):
    """A search in each slot."""

    search: BeamSearchState
    """Its keys are kept as data."""
    live: Bool[Array, " B"]
    settings: RowSettings


@dataclasses.dataclass(frozen=True)
class BeamGroup:
    """The strategy of rows with as many beams and one rule of ending."""

    beams: int
    early_stopping: bool | str
    sampling: bool
    allow_nonfinite: bool

    def blank(self, arrivals: Arrivals, cache: Cache, sizes: Sizes) -> BeamSlots:
        settings = arrivals.settings
        prompt = self._prompt(arrivals, sizes)
        state = self._search(settings).before(prompt, cache, sizes.room)
        return self._packed(state, settings)

    def first(
        self, arrivals: Arrivals, read: DecodeOutput, stops: StoppingCriteriaList, sizes: Sizes
    ) -> BeamSlots:
        settings, search = arrivals.settings, self._search(arrivals.settings)
        state = search.before(self._prompt(arrivals, sizes), read.cache, sizes.room)
        state = search.choose_first(state, read, self._shared(settings, stops), sizes.room)
        return self._packed(state, settings)

    def step(self, model: Any, slots: BeamSlots, stops: StoppingCriteriaList) -> BeamSlots:
        settings, search = slots.settings, self._search(slots.settings)
        before = slots.search.replace(keys=jax.random.wrap_key_data(slots.search.keys))
        after = search.step(model, before, self._shared(settings, stops))
        return self._packed(_where(slots.live, after, before), settings)

    def texts(self, slots: BeamSlots) -> SlotOutputs:
        search = slots.search
        count = jnp.sum(search.finished.origin >= 0, axis=2, dtype=jnp.int32)
        length = search.start_len[:, None] + count
        return SlotOutputs(
            tokens=search.finished.sequences,
            start=search.start_len,
            length=length,
            stopped=(count > 0) & (length < slots.settings.limit[:, None]),
            first_nonfinite_step=search.first_nonfinite_step,
        )

    def _search(self, settings: RowSettings) -> BeamSearch:
        return BeamSearch(
            length_penalty=settings.length_penalty,
            beams=self.beams,
            returns=self.beams,
            early_stopping=self.early_stopping,
            sampling=self.sampling,
        )

    def _shared(self, settings: RowSettings, stops: StoppingCriteriaList) -> DecodeSettings:
        """The rows' settings as a search reads them."""
        return DecodeSettings(
            processors=row_by_row(settings.processors),
            eos=settings.eos,
            pad=jnp.int32(0),
            max_length=settings.limit,
            stops=watched(stops, settings.watched),
            allow_nonfinite=self.allow_nonfinite,
        )

    def _prompt(self, arrivals: Arrivals, sizes: Sizes) -> Prompt:
        width = arrivals.tokens.shape[1]
        return Prompt(
            inputs={},
            encoder={},
            sequences=jnp.pad(arrivals.tokens, ((0, 0), (0, sizes.columns - width))),
            mask=jnp.arange(sizes.columns) < arrivals.start[:, None],
            start_len=arrivals.start,
            columns=arrivals.start,
            at=arrivals.start - 1,
            keys=arrivals.keys(),
        )

    def _packed(self, state: BeamSearchState, settings: RowSettings) -> BeamSlots:
        live = self._search(settings).open_rows(state) & (state.cur_len < settings.limit)
        cache = state.cache.replace(length=jnp.where(live, state.cache.length, 0))
        tree = dataclasses.replace(state.tree, cache=cache)
        state = state.replace(tree=tree, keys=jax.random.key_data(state.keys))
        return BeamSlots(search=state, live=live, settings=settings)


def _where(live: Bool[Array, " B"], new: BeamSearchState, old: BeamSearchState) -> BeamSearchState:
    """The new state of live rows. Keys and values of the others do not matter any more."""

    def one(path, new, old):
        if of_layers(path):
            return new
        return jnp.where(live.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree_util.tree_map_with_path(one, new, old)
