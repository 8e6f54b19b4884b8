"""Slots whose newest tokens the host reads after every few steps, with their log-probabilities.

`jaxllm.serve` streams from them. The decode step is that of all slots; only what the host reads of
it differs: the last tokens of each row instead of whole sequences.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import RowSettings, Slots
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.sample import NextTokenLogits, Sample, SampleState
from jaxllm.generation.strategies.strategy import DecodeSettings, PrefillInputs
from jaxllm.parallel.vocabulary import top_k


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
    total: Int[Array, " B"]
    """Number of new tokens so far."""
    stopped: Bool[Array, " B"]
    """True if EOS ended the sequence."""
    first_nonfinite_step: Int[Array, " B"]
    """Number of the new token at which the logits were not finite, or -1."""
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

        reports = jnp.any(self.reports_logprobs & ~state.is_finished)
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
        numbers = state.step[:, None] - self.window + jnp.arange(self.window)
        columns = (state.cur_len - state.step)[:, None] + numbers

        def take(x: Array, index: Array) -> Array:
            index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
            return jnp.take_along_axis(x, index, axis=1, mode="clip")

        return NewTokens(
            tokens=take(state.sequences, jnp.maximum(columns, 0)),
            total=state.step,
            stopped=state.is_finished,
            first_nonfinite_step=state.first_nonfinite_step,
            logprobs=jax.tree.map(lambda x: take(x, numbers % self.window), state.logprobs),
        )
