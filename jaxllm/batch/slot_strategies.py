"""The strategies of `generate` over slots.

A slot is a row of the strategy's state, in which every row counts its columns and steps by itself.
A row whose slot is not live any more keeps the state that it ended with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slots import Arrivals, RowSettings, SlotOutputs, Slots
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.processors.per_row import row_by_row
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.generation.stopping.base import for_rows
from jaxllm.generation.strategies.beam.beam_search import BeamSearch, BeamSearchState
from jaxllm.generation.strategies.sample import Sample, SampleState
from jaxllm.generation.strategies.strategy import NEVER, DecodeSettings, Prompt
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.field_axes import map_with_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotStrategy:
    """A strategy over slots; hashable, since compiled programs follow from it.

    A subclass makes the strategy from the settings of the rows, and reads the sequences out of its
    state.
    """

    sampling: bool
    """Some rows draw their tokens."""
    allow_nonfinite: bool
    beams: int = 1
    """Sequences that a slot decodes."""

    def strategy(self, settings: RowSettings) -> Sample | BeamSearch:
        raise NotImplementedError

    def outputs(self, slots: Slots) -> SlotOutputs:
        """The sequences of all slots."""
        raise NotImplementedError

    def before(self, arrivals: Arrivals, cache: Cache, sizes: Sizes) -> Slots:
        """Slots of rows whose prompts are in the cache, before anything is chosen."""
        settings = arrivals.settings
        state = self.strategy(settings).initial_state(_prompt(arrivals, sizes), cache, sizes.room)
        return self._slots(state, settings, jnp.ones(arrivals.start.shape, bool))

    def first(
        self,
        model: Any,
        arrivals: Arrivals,
        out: DecodeOutput,
        stops: StoppingCriteriaList,
        sizes: Sizes,
    ) -> Slots:
        """Slots after the first token, from the model's output for the prompts."""
        rows, prompt = arrivals.settings, _prompt(arrivals, sizes)
        settings = self._decode_settings(rows, stops)
        state = self.strategy(rows).init(model, prompt, out, settings, sizes.room)
        return self._slots(state, rows, jnp.ones(arrivals.start.shape, bool))

    def step(self, model: Any, slots: Slots, stops: StoppingCriteriaList) -> Slots:
        """One more token for every live row."""
        rows, before = slots.settings, slots.state
        before = before.replace(keys=jax.random.wrap_key_data(before.keys))
        after = self.strategy(rows).step(model, before, self._decode_settings(rows, stops))
        return self._slots(_where(slots.live, after, before), rows, slots.live)

    def _decode_settings(self, rows: RowSettings, stops: StoppingCriteriaList) -> DecodeSettings:
        return DecodeSettings(
            processors=row_by_row(rows.processors),
            eos=rows.eos,
            pad=jnp.int32(0),
            max_length=rows.max_length,
            stops=for_rows(stops, rows.watched),
            allow_nonfinite=self.allow_nonfinite,
        )

    def _slots(self, state: Any, settings: RowSettings, live: Bool[Array, " B"]) -> Slots:
        live &= self.strategy(settings).open_rows(state) & (state.cur_len < settings.max_length)
        live &= state.first_nonfinite_step == NEVER

        def free(x: Any) -> Any:
            """A cache of length 0 in free slots: the others do not read more for them."""
            if not isinstance(x, Cache):
                return x
            return x.replace(length=jnp.where(live, x.length, 0))

        state = jax.tree.map(free, state, is_leaf=lambda x: isinstance(x, Cache))
        return Slots(state.replace(keys=jax.random.key_data(state.keys)), live, settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSlots(SlotStrategy):
    """Greedy search and sampling: a sequence in each slot."""

    def strategy(self, settings: RowSettings) -> Sample:
        return Sample(sampling=self.sampling, sampled=settings.sampled)

    def outputs(self, slots: Slots) -> SlotOutputs:
        state: SampleState = slots.state
        return SlotOutputs(
            tokens=state.sequences[:, None],
            start=state.cur_len - state.step,
            length=state.cur_len[:, None],
            stopped=state.done[:, None],
            first_nonfinite_step=state.first_nonfinite_step,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSlots(SlotStrategy):
    """Beam search and beam sampling: the beams of a row in each slot.

    The cache of a slot holds the prompt once, and then a column for each beam and step
    (`BeamCache`).
    """

    early_stopping: bool | str

    def strategy(self, settings: RowSettings) -> BeamSearch:
        return BeamSearch(
            length_penalty=settings.length_penalty,
            num_beams=self.beams,
            num_return_sequences=self.beams,
            early_stopping=self.early_stopping,
            sampling=self.sampling,
        )

    def outputs(self, slots: Slots) -> SlotOutputs:
        state: BeamSearchState = slots.state
        count = jnp.sum(state.finished.beam_indices >= 0, axis=2, dtype=jnp.int32)
        length = state.start_len[:, None] + count
        return SlotOutputs(
            tokens=state.finished.sequences,
            start=state.start_len,
            length=length,
            stopped=(count > 0) & (length < slots.settings.max_length[:, None]),
            first_nonfinite_step=state.first_nonfinite_step,
        )


def _prompt(arrivals: Arrivals, sizes: Sizes) -> Prompt:
    """The prompts as a strategy takes them: from column 0 on, without padding on the left."""
    width = arrivals.tokens.shape[1]
    start = jnp.asarray(arrivals.start)
    return Prompt(
        decoder_inputs={},
        encoder_inputs={},
        sequences=jnp.pad(arrivals.tokens, ((0, 0), (0, sizes.columns - width))),
        mask=jnp.arange(sizes.columns) < start[:, None],
        start_len=start,
        cache_len=start,
        last_column=start - 1,
        keys=arrivals.keys(),
    )


def _where(live: Bool[Array, " B"], new: Any, old: Any) -> Any:
    """The new state of live rows. Keys and values of the others do not matter any more."""

    def one(names, new, old):
        if "heads" in names:
            return new
        return jnp.where(live.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return map_with_axes(one, new, old)
