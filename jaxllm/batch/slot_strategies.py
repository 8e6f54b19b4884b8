"""The decoding strategies of `generate`, run over slots.

A slot is a row of the strategy's state, with its own length and step count. A slot whose row is
finished keeps its final state.

`jaxllm.serve` streams from slots (`StreamedSlotStrategy`): the host reads the newest tokens of each
row after every few steps, with their log-probabilities, instead of whole sequences at the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.batch.slots import PrefillBatch, RowSettings, Sizes, SlotOutputs, Slots
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.loop import first_state
from jaxllm.generation.stopping import StoppingCriteriaList, StopStringCriteria
from jaxllm.generation.strategies.beam_search import BeamSearch
from jaxllm.generation.strategies.beam_state import BeamState
from jaxllm.generation.strategies.sample import NextTokenLogits, Sample, SampleState
from jaxllm.generation.strategies.strategy import (
    RUNNING,
    AnyStrategy,
    DecodeSettings,
    PrefillInputs,
)
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.field_axes import Axes, map_with_axes
from jaxllm.parallel.vocabulary import top_k

S = TypeVar("S")


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

    def outputs(self, slots: Slots) -> Any:
        """Arrays that the host reads of all slots after a decode call: a pytree, such as
        `SlotOutputs`, which has all sequences."""
        raise NotImplementedError

    def initial_slots(self, batch: PrefillBatch, cache: Cache, sizes: Sizes) -> Slots:
        """Slots of rows whose prompts are in the cache, before the first token is chosen."""
        settings, inputs = batch.settings, _prefill_inputs(batch, sizes)
        state = self.strategy(settings).initial_state(inputs, cache, sizes.new_token_bucket)
        return self._slots(state, settings)

    def prefill(
        self,
        model: Decoder,
        batch: PrefillBatch,
        cache: Cache,
        stops: StoppingCriteriaList,
        sizes: Sizes,
        rest_width: int | None = None,
    ) -> Slots:
        """Slots after the prompts and their first tokens.

        Args:
            cache: an empty one of the prompts' rows.
            rest_width: the cache has the first columns of the prompts already; this many are new.
        """
        settings, inputs = batch.settings, _prefill_inputs(batch, sizes)
        if rest_width is not None:
            inputs = _rest_of(inputs, cache, rest_width)
        state: SampleState | BeamState = first_state(
            cast(AnyStrategy, self.strategy(settings)),
            model,
            inputs,
            cache,
            self._decode_settings(settings, stops),
            new_token_bucket=sizes.new_token_bucket,
        )
        return self._slots(state, settings)

    def step(self, model: Decoder, slots: Slots, stops: StoppingCriteriaList) -> Slots:
        """One more token for every unfinished row."""
        settings = slots.settings
        old = slots.state.replace(keys=jax.random.wrap_key_data(slots.state.keys))
        new = self.strategy(settings).step(model, old, self._decode_settings(settings, stops))
        return self._slots(_where_unfinished(slots.unfinished, new, old), settings)

    def _decode_settings(
        self, settings: RowSettings, stops: StoppingCriteriaList
    ) -> DecodeSettings:
        used = settings.uses_stop_list.T
        lists = (cast(StopStringCriteria, stop) for stop in stops)
        return DecodeSettings(
            processors=settings.processors,
            eos=settings.eos,
            pad=jnp.int32(0),
            max_length=settings.max_length,
            stops=StoppingCriteriaList(map(StopStringCriteria.for_rows, lists, used)),
            allow_nonfinite=self.allow_nonfinite,
            padded=False,
        )

    def _slots(self, state: SampleState | BeamState, settings: RowSettings) -> Slots:
        """Slots of a state."""

        def shorten_free_slots(x: object) -> object:
            """Sets the cache length of free slots to 0, so that attention reads no further than
            unfinished rows need."""
            if not isinstance(x, Cache):
                return x
            return x.replace(length=jnp.where(state.reason == RUNNING, x.length, 0))

        shortened = jax.tree.map(shorten_free_slots, state, is_leaf=lambda x: isinstance(x, Cache))
        return Slots(shortened.replace(keys=jax.random.key_data(state.keys)), settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSlotStrategy(SlotStrategy):
    """Greedy search and sampling: one sequence per slot."""

    def strategy(self, settings: RowSettings) -> Sample:
        return Sample(sampling=self.sampling, sampled_rows=settings.sampled_rows)

    def outputs(self, slots: Slots) -> SlotOutputs:
        state: SampleState = slots.state
        return SlotOutputs(
            tokens=state.sequences[:, None],
            prompt_length=state.cur_len - state.step,
            counts=state.count[:, None],
            reasons=state.reason[:, None],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSlotStrategy(SlotStrategy):
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
        best = self.strategy(slots.settings).best(slots.state)
        return SlotOutputs(best.sequences, slots.state.start_len, best.count, best.reason)


def _prefill_inputs(batch: PrefillBatch, sizes: Sizes) -> PrefillInputs:
    """Strategy inputs of the prompts, which start at position 0 (right-padded)."""
    width = batch.tokens.shape[1]
    prompt_length = jnp.asarray(batch.prompt_length)
    mask = jnp.arange(sizes.columns)[None] < prompt_length[:, None]
    return PrefillInputs(
        decoder_inputs={"tokens": batch.tokens, "mask": mask[:, :width]},
        encoder_inputs={},
        sequences=jnp.pad(batch.tokens, ((0, 0), (0, sizes.columns - width))),
        mask=mask,
        start_len=prompt_length,
        cache_len=prompt_length,
        last_column=prompt_length - 1,
        keys=batch.keys(),
    )


def _rest_of(inputs: PrefillInputs, cache: Cache, width: int) -> PrefillInputs:
    """Strategy inputs of the prompts' `width` columns after those of the cache."""

    def rest(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, cache.length, width, axis=1)

    return dataclasses.replace(
        inputs,
        decoder_inputs={"tokens": rest(inputs.sequences), "mask": rest(inputs.mask)},
        last_column=inputs.last_column - cache.length,
        past_cache=cache,
    )


def _where_unfinished(unfinished: Bool[Array, " B"], new: S, old: S) -> S:
    """Selects `new` for unfinished rows and `old` for the others. Keys and values are always `new`,
    since those of finished rows are never read."""

    def select(axes: Axes, new: Array, old: Array) -> Array:
        if "heads" in axes or new.ndim == 0:  # keys or values of the cache; a number of all rows
            return new
        return jnp.where(unfinished.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return map_with_axes(select, new, old)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedSettings(RowSettings):
    """Settings of B rows that are streamed."""

    logprobs: Bool[Array, " B"]
    """True for rows that report log-probabilities."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the last W tokens of B rows; new token n is in column n modulo W.

    They are those of the model's own distribution, before processors. Only columns of rows that
    ask for them have a meaning.
    """

    chosen: Float[Array, "B W"]
    """Log-probability of the chosen token."""
    top_tokens: Int[Array, "B W K"]
    """The K most probable tokens, the most probable first."""
    top: Float[Array, "B W K"]
    """Log-probabilities of `top_tokens`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedState(SampleState):
    """State of greedy search and sampling, with log-probabilities."""

    logprobs: Logprobs | None = None


class NewTokens(NamedTuple):
    """The last W new tokens of each slot, the newest in the last column."""

    tokens: Int[Array, "B W"]
    """A row with fewer new tokens has no meaning in its first columns."""
    counts: Int[Array, " B"]
    """Number of new tokens so far."""
    reasons: Int[Array, " B"]
    """`RUNNING`, or why the row has ended; an index of `FINISH_REASONS`."""
    logprobs: Logprobs
    """In the order of `tokens`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedSample(Sample):
    """Greedy search and sampling that keeps the log-probabilities of the last tokens."""

    window: int = dataclasses.field(default=1, metadata={"static": True})
    """W, the number of tokens."""
    top_logprobs: int = dataclasses.field(default=1, metadata={"static": True})
    """K, the number of most probable tokens."""
    reports_logprobs: Bool[Array, " B"] | None = None
    """Rows that report them."""

    def initial_state(
        self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int
    ) -> StreamedState:
        state = super().initial_state(inputs, cache, new_token_bucket)
        shape = (*state.token.shape, self.window, self.top_logprobs)
        empty = jnp.zeros(shape[:2]), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
        return StreamedState(**vars(state), logprobs=Logprobs(*empty))

    def append_chosen(
        self, state: SampleState, logits: NextTokenLogits, settings: DecodeSettings
    ) -> StreamedState:
        assert isinstance(state, StreamedState)
        assert state.logprobs is not None
        assert self.reports_logprobs is not None
        earlier = state.logprobs
        new: Any = super().append_chosen(state, logits, settings)

        def record() -> Logprobs:
            row, column = jnp.arange(new.token.shape[0]), state.step % self.window
            log_probs = jax.nn.log_softmax(logits.raw.astype(jnp.float32))
            top, top_tokens = top_k(log_probs, self.top_logprobs)
            return Logprobs(
                chosen=earlier.chosen.at[row, column].set(log_probs[row, new.token]),
                top_tokens=earlier.top_tokens.at[row, column].set(top_tokens),
                top=earlier.top.at[row, column].set(top),
            )

        reports = jnp.any(self.reports_logprobs & (state.reason == RUNNING))
        # Over the whole vocabulary, so only while a row asks for it.
        return new.replace(logprobs=jax.lax.cond(reports, record, lambda: earlier))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedSlotStrategy(SlotStrategy):
    """Greedy search and sampling, one sequence per slot, whose newest tokens are read."""

    window: int
    """New tokens that the host reads of a row after a decode call: at least as many as there were
    steps since it last read them."""
    top_logprobs: int
    """Most probable tokens of each step that are reported."""

    def strategy(self, settings: RowSettings) -> StreamedSample:
        assert isinstance(settings, StreamedSettings)
        return StreamedSample(
            sampling=self.sampling,
            sampled_rows=settings.sampled_rows,
            window=self.window,
            top_logprobs=self.top_logprobs,
            reports_logprobs=settings.logprobs,
        )

    def outputs(self, slots: Slots) -> NewTokens:
        state: StreamedState = slots.state
        assert state.logprobs is not None
        numbers = state.count[:, None] - self.window + jnp.arange(self.window)[None]
        columns = (state.cur_len - state.step)[:, None] + numbers

        def take(x: Array, index: Array) -> Array:
            index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
            return jnp.take_along_axis(x, index, axis=1, mode="clip")

        return NewTokens(
            tokens=take(state.sequences, jnp.maximum(columns, 0)),
            counts=state.count,
            reasons=state.reason,
            logprobs=jax.tree.map(lambda x: take(x, numbers % self.window), state.logprobs),
        )
