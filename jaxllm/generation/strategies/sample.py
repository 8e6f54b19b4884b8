"""Greedy search and sampling: one token per row and step.

With `StreamedSample` the host reads the newest tokens of each row after every few steps, with their
log-probabilities, instead of whole sequences at the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxllm.cache.kv_cache import Cache, write_columns
from jaxllm.generation.strategies.draws import choose_greedy, choose_sample
from jaxllm.generation.strategies.records import Records, initial_records
from jaxllm.generation.strategies.strategy import (
    NONFINITE,
    RUNNING,
    DecodeSettings,
    Length,
    Logprobs,
    PrefillInputs,
    Result,
    S,
    Strategy,
    end_reasons,
    nonfinite,
    unconditional,
)
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.field_axes import axes
from jaxllm.parallel.vocabulary import top_k


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleState:
    """State of greedy search and sampling, donated to the loop so that it is updated in place."""

    sequences: Int[Array, "B L"]
    """Prompt and generated tokens, pad beyond `cur_len`. L is a bucket."""
    mask: Bool[Array, "B L"]
    """True at real tokens, False at the prompt's padding and at pads after a row's end."""
    cur_len: Length
    """Columns in use, prompt included."""
    token: Int[Array, " B"]
    """The newest token of each row; not in the cache yet."""
    count: Int[Array, " B"]
    """New tokens of each row, the end token included."""
    reason: Int[Array, " B"]
    """`RUNNING`, or why the row has ended."""
    keys: Key[Array, " B"] | UInt32[Array, "B _"]
    """One key per row, as raw data in batch slots. Step t draws with fold_in(key, t), so a row's
    draws do not depend on the batch."""
    step: Length
    """Steps so far: new tokens of each row that has not ended."""
    cache: Cache
    scores: Float[Array, "N B V"] | None = dataclasses.field(
        default=None, metadata=axes(None, "rows")
    )
    """Processed scores of every step (`output_scores`)."""
    logits: Float[Array, "N B V"] | None = dataclasses.field(
        default=None, metadata=axes(None, "rows")
    )
    """Raw logits of every step (`output_logits`)."""
    records: Records | None = dataclasses.field(default=None, metadata=axes(None, "rows"))
    """Hidden states and attentions of every step (`output_hidden_states`, `output_attentions`)."""

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


AnyState = TypeVar("AnyState", bound=SampleState)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NextTokenLogits:
    """Logits of each row's next token, from one call of the model."""

    raw: Float[Array, "B V"]
    """The model's logits."""
    processor_input: Float[Array, "B V"]
    """Input of the logits processors: `raw`, unless a subclass changes them (DoLa)."""
    unconditional: Float[Array, "B V"] | None
    """Logits after the negative prompt (guidance)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample(Strategy[SampleState]):
    """Greedy search and sampling: the best token, or one drawn from the processed scores."""

    sampling: bool = dataclasses.field(metadata={"static": True})
    """True if some rows sample; False: greedy search."""
    num_return_sequences: int = dataclasses.field(default=1, metadata={"static": True})
    """Results per prompt, which is prefilled once for all of them."""
    sampled_rows: Bool[Array, " B"] | None = None
    """Rows that sample, if `sampling`; None: all."""
    allows_ring_cache = True
    can_repeat_steps = True
    chooses_in_prefill = True

    @property
    def draws(self) -> bool:
        return self.sampling

    @property
    def keys_per_row(self) -> int:
        return self.num_return_sequences

    def init(
        self,
        model: Decoder,
        inputs: PrefillInputs,
        out: DecodeOutput,
        settings: DecodeSettings,
        new_token_bucket: int,
    ) -> SampleState:
        every_row = jnp.ones(inputs.last_column.shape, bool)
        logits = self.next_token_logits(model, out, inputs.last_column, every_row)
        logits = jax.tree.map(lambda x: jnp.repeat(x, self.num_return_sequences, axis=0), logits)
        state = self.initial_state(inputs, out.cache, new_token_bucket)
        state = with_score_buffers(state, logits.raw, settings, new_token_bucket)
        records = initial_records(
            out, self.num_return_sequences, new_token_bucket, **settings.decode_options
        )
        return self.append_chosen(state.replace(records=records), logits, settings)

    def initial_state(
        self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int
    ) -> SampleState:
        """The state before the first token, with a cache that holds the prompt."""
        return initial_sample_state(
            inputs, cache.repeat(self.num_return_sequences), self.num_return_sequences
        )

    def step(self, model: Decoder, state: SampleState, settings: DecodeSettings) -> SampleState:
        unfinished = state.reason == RUNNING
        options = {**settings.decode_options, **self.extra_decode_options}
        out = model.decode(state.token[:, None], unfinished[:, None], state.cache, **options)
        if state.records is not None:
            state = state.replace(records=state.records.write(out, state.step))
        logits = self.next_token_logits(model, out, None, unfinished)
        return self.append_chosen(state.replace(cache=out.cache), logits, settings)

    def next_token_logits(
        self,
        model: Decoder,
        out: DecodeOutput,
        last_column: Int[Array, " B"] | None,
        unfinished: Bool[Array, " B"],
    ) -> NextTokenLogits:
        """Logits after each row's last token, from the model's output for its last columns.

        Args:
            last_column: with several columns in `out` (prefill), the last real one of each row. The
                logits are those of this column already; subclasses read hidden states.
            unfinished: rows that get a token.
        """
        logits = out.logits[:, 0]
        return NextTokenLogits(logits, logits, unconditional(out))

    def append_chosen(
        self, state: SampleState, logits: NextTokenLogits, settings: DecodeSettings
    ) -> SampleState:
        """Processes the logits of a step, chooses its tokens and appends them."""
        scores = processed_scores(state, logits.processor_input, logits.unconditional, settings)
        token = self.choose(state, scores)
        return append(state, token, logits.raw, scores, settings)

    def choose(self, state: SampleState, scores: Float[Array, "B V"]) -> Int[Array, " B"]:
        """Each row's next token."""
        if not self.sampling:
            return choose_greedy(scores)
        token = choose_sample(state.keys, scores, state.step)
        if self.sampled_rows is None:
            return token
        return jnp.where(self.sampled_rows, token, choose_greedy(scores))

    def finish(self, state: SampleState, settings: DecodeSettings) -> Result:
        return sample_result(state)


def initial_sample_state(inputs: PrefillInputs, cache: Cache, samples: int) -> SampleState:
    """State before the first token, with each row repeated `samples` times."""
    batch = inputs.sequences.shape[0] * samples
    return SampleState(
        sequences=jnp.repeat(inputs.sequences, samples, axis=0),
        mask=jnp.repeat(inputs.mask, samples, axis=0),
        cur_len=jnp.asarray(inputs.start_len),
        token=jnp.zeros((batch,), jnp.int32),
        count=jnp.zeros((batch,), jnp.int32),
        reason=jnp.full((batch,), RUNNING, jnp.int32),
        keys=inputs.keys,
        step=jnp.zeros_like(inputs.start_len, jnp.int32),
        cache=cache,
    )


def with_score_buffers(
    state: S, logits: Float[Array, "B V"], settings: DecodeSettings, new_token_bucket: int
) -> S:
    """Adds buffers for the scores and logits of every step, if they are kept."""
    if settings.keep_scores:
        state = state.replace(scores=jnp.zeros((new_token_bucket, *logits.shape), logits.dtype))
    if settings.keep_logits:
        state = state.replace(logits=jnp.zeros((new_token_bucket, *logits.shape), logits.dtype))
    return state


def processed_scores(
    state: SampleState,
    logits: Float[Array, "B V"],
    unconditional: Float[Array, "B V"] | None,
    settings: DecodeSettings,
) -> Float[Array, "B V"]:
    """Scores of each row's next token, after the logits processors."""
    return settings.processors(
        state.sequences,
        logits,
        state.cur_len,
        mask=state.mask if settings.aligned else None,
        prompt_len=state.cur_len - state.step,
        unconditional_logits=unconditional,
    )


def record_step(
    state: S, logits: Float[Array, "R V"], scores: Float[Array, "R V"], settings: DecodeSettings
) -> S:
    """Records scores and logits of this step, and ends rows whose logits are not finite.

    R: rows of a step; with beams those are all beams of the B rows.
    """
    reason = state.reason
    if not settings.allow_nonfinite:
        rows = (reason.shape[0], -1)
        is_bad = nonfinite(logits.reshape(rows), scores.reshape(rows))
        reason = jnp.where(is_bad & (reason == RUNNING), NONFINITE, reason)
    return state.replace(
        scores=write_step(state.scores, scores, state.step),
        logits=write_step(state.logits, logits, state.step),
        reason=reason,
    )


def write_step(
    buffer: Float[Array, "N R V"] | None,
    values: Float[Array, "R V"],
    step: Length,
) -> Float[Array, "N R V"] | None:
    """Writes the scores or logits of a step to their buffer; None if they are not kept."""
    if buffer is None:
        return None
    return jax.lax.dynamic_update_slice_in_dim(buffer, values[None], step, axis=0)


def sample_result(state: SampleState) -> Result:
    """Result of a state whose rows are all returned."""
    return Result(
        sequences=state.sequences,
        length=state.cur_len,
        steps=state.step,
        lengths=state.count,
        finish_reasons=state.reason,
        scores=state.scores,
        logits=state.logits,
        records=state.records,
    )


def append(
    state: AnyState,
    token: Int[Array, " B"],
    logits: Float[Array, "B V"],
    scores: Float[Array, "B V"],
    settings: DecodeSettings,
) -> AnyState:
    """Writes a token to each running row and a pad to the other rows, counts the new tokens, and
    sets the reason of the rows that end."""
    state = record_step(state, logits, scores, settings)
    running = state.reason == RUNNING
    token = jnp.where(running, token, settings.pad)
    sequences = write_columns(state.sequences, token[:, None], state.cur_len)
    mask = write_columns(state.mask, running[:, None], state.cur_len)
    cur_len = state.cur_len + 1
    is_stopped = settings.stops(sequences, scores, cur_len, mask=mask if settings.aligned else None)
    reason = end_reasons(token, cur_len >= settings.max_length, is_stopped, settings)
    return state.replace(
        sequences=sequences,
        mask=mask,
        cur_len=cur_len,
        token=token,
        count=state.count + running.astype(jnp.int32),
        reason=jnp.where(running, reason, state.reason),
        step=state.step + 1,
    )


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
