"""Greedy search and sampling whose newest tokens the host reads after every few steps, with their
log-probabilities, instead of whole sequences at the end."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.sample import NextTokenLogits, Sample, SampleState
from jaxllm.generation.strategies.strategy import (
    RUNNING,
    DecodeSettings,
    Logprobs,
    PrefillInputs,
    Result,
)
from jaxllm.parallel.vocabulary import top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamedState(SampleState):
    """State of greedy search and sampling, with log-probabilities."""

    logprobs: Logprobs | None = None


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

    def finish(self, state: SampleState, settings: DecodeSettings) -> Result:
        """The last W new tokens of each row, the newest in the last column, with their
        log-probabilities. A row with fewer new tokens has no meaning in its first columns."""
        assert isinstance(state, StreamedState)
        numbers = state.count[:, None] - self.window + jnp.arange(self.window)[None]
        columns = (state.cur_len - state.step)[:, None] + numbers

        def take(x: Array, index: Int[Array, "B W"]) -> Array:
            index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
            return jnp.take_along_axis(x, index, axis=1, mode="clip")

        return dataclasses.replace(
            super().finish(state, settings),
            sequences=take(state.sequences, jnp.maximum(columns, 0)),
            logprobs=jax.tree.map(lambda x: take(x, numbers % self.window), state.logprobs),
        )
