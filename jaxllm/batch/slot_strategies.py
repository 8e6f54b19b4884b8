"""The decoding strategies of `generate`, run over slots.

A slot is a row of the strategy's state, with its own length and step count. A slot whose row is
finished keeps its final state.
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
from jaxllm.generation.strategies.strategy import (
    NEVER,
    DecodeSettings,
    Prompt,
    unfinished_rows,
)
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.field_axes import map_with_axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotStrategy:
    """A decoding strategy over slots; hashable, since it is a static argument of the programs.

    A subclass builds the strategy from the rows' settings and extracts the sequences from its
    state.
    """

    sampling: bool
    """True if some rows sample."""
    allow_nonfinite: bool
    beams: int = 1
    """Number of beams of a slot."""

    def strategy(self, settings: RowSettings) -> Sample | BeamSearch:
        raise NotImplementedError

    def outputs(self, slots: Slots) -> SlotOutputs:
        """The sequences of all slots."""
        raise NotImplementedError

    def before(self, arrivals: Arrivals, cache: Cache, sizes: Sizes) -> Slots:
        """Slots of rows whose prompts are in the cache, before anything is chosen."""
        settings, prompt = arrivals.settings, _prompt(arrivals, sizes)
        state = self.strategy(settings).initial_state(prompt, cache, sizes.new_token_bucket)
        return self._slots(state, settings, jnp.ones(arrivals.start.shape, bool))

    def first(
        self,
        model: Decoder,
        arrivals: Arrivals,
        out: DecodeOutput,
        stops: StoppingCriteriaList,
        sizes: Sizes,
    ) -> Slots:
        """Slots after the first token, from the model's output for the prompts."""
        rows, prompt = arrivals.settings, _prompt(arrivals, sizes)
        settings = self._decode_settings(rows, stops)
        state = self.strategy(rows).init(model, prompt, out, settings, sizes.new_token_bucket)
        return self._slots(state, rows, jnp.ones(arrivals.start.shape, bool))

    def step(self, model: Decoder, slots: Slots, stops: StoppingCriteriaList) -> Slots:
        """One more token for every unfinished row."""
        rows, before = slots.settings, slots.state
        before = before.replace(keys=jax.random.wrap_key_data(before.keys))
        after = self.strategy(rows).step(model, before, self._decode_settings(rows, stops))
        return self._slots(_where(slots.unfinished, after, before), rows, slots.unfinished)

    def _decode_settings(self, rows: RowSettings, stops: StoppingCriteriaList) -> DecodeSettings:
        return DecodeSettings(
            processors=row_by_row(rows.processors),
            eos=rows.eos,
            pad=jnp.int32(0),
            max_length=rows.max_length,
            stops=for_rows(stops, rows.watched),
            allow_nonfinite=self.allow_nonfinite,
        )

    def _slots(self, state: Any, settings: RowSettings, unfinished: Bool[Array, " B"]) -> Slots:
        unfinished &= unfinished_rows(state, settings.max_length)
        unfinished &= state.first_nonfinite_step == NEVER

        def free(x: Any) -> Any:
            """Sets the cache length of free slots to 0, so that attention reads no further than
            unfinished rows need."""
            if not isinstance(x, Cache):
                return x
            return x.replace(length=jnp.where(unfinished, x.length, 0))

        state = jax.tree.map(free, state, is_leaf=lambda x: isinstance(x, Cache))
        return Slots(state.replace(keys=jax.random.key_data(state.keys)), unfinished, settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSlots(SlotStrategy):
    """Greedy search and sampling: one sequence per slot."""

    def strategy(self, settings: RowSettings) -> Sample:
        return Sample(sampling=self.sampling, sampled=settings.sampled)

    def outputs(self, slots: Slots) -> SlotOutputs:
        state: SampleState = slots.state
        return SlotOutputs(
            tokens=state.sequences[:, None],
            start=state.cur_len - state.step,
            length=state.cur_len[:, None],
            stopped=state.is_finished[:, None],
            first_nonfinite_step=state.first_nonfinite_step,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSlots(SlotStrategy):
    """Beam search and beam sampling: all beams of a row in one slot.

    The KV cache of a slot holds the prompt once, then one position for each beam and step
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
    """Strategy inputs of the prompts, which start at position 0 (right-padded)."""
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


def _where(unfinished: Bool[Array, " B"], new: Any, old: Any) -> Any:
    """Selects `new` for unfinished rows and `old` for the others. Keys and values are always `new`,
    since those of finished rows are never read."""

    def one(names, new, old):
        if "heads" in names:  # keys or values of the cache
            return new
        return jnp.where(unfinished.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return map_with_axes(one, new, old)
