"""Assisted (speculative) generation: a draft proposes tokens, one pass of the model checks them.

Like `_assisted_decoding` of transformers 5.23, but for batches: rows accept different numbers of
drafted tokens and so have different lengths. Rejected tokens stay in the buffers beyond each row's
length. Greedy results are those of greedy search; samples are distributed as without the draft.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.generation.strategies.assisted.acceptance import (
    DRAFT,
    DraftTokens,
    accept_matching,
    accept_speculative,
    mix_with_draft,
    position_keys,
)
from jaxllm.generation.strategies.assisted.drafts import (
    Draft,
    DraftInputs,
    Proposal,
    repeat_for_samples,
)
from jaxllm.generation.strategies.assisted.state import (
    AssistedState,
    append_columns,
    process_columns,
)
from jaxllm.generation.strategies.records import initial_records
from jaxllm.generation.strategies.strategy import (
    NEVER,
    AssistedCounts,
    DecodeSettings,
    PrefillInputs,
    Result,
    Strategy,
    unfinished_rows,
)
from jaxllm.generation.strategies.token_choice import choose_greedy, choose_sample
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assisted(Strategy[AssistedState]):
    """Assisted generation in rounds: a draft, its check by the model, and one more token."""

    draft: Draft
    num_assistant_tokens: Int[Array, ""]
    """Number of tokens of the first draft."""
    grows: Bool[Array, ""]
    """True for the heuristic schedule: 2 tokens more after a fully accepted draft, else 1 less."""
    sampling: bool = dataclasses.field(metadata={"static": True})
    max_draft: int = dataclasses.field(metadata={"static": True})
    """G, the longest draft: a static bucket for the traced number of tokens."""
    num_return_sequences: int = dataclasses.field(default=1, metadata={"static": True})
    """Results per prompt."""
    ensemble_weight: Float[Array, ""] | None = None
    """Weight of the model in the mixture of model and draft that decides acceptance."""

    @property
    def keys_per_row(self) -> int:
        return self.num_return_sequences

    def cache_slots(self, new_tokens: int) -> int:
        return new_tokens + self.max_draft + 1  # a whole draft is written before it is cut

    def init(
        self,
        model: Decoder,
        inputs: PrefillInputs,
        out: DecodeOutput,
        settings: DecodeSettings,
        new_token_bucket: int,
    ) -> AssistedState:
        cache = out.cache.repeat(self.num_return_sequences)
        logits, unconditional, sequences, mask = jax.tree.map(
            lambda x: jnp.repeat(x, self.num_return_sequences, axis=0),
            (out.logits, out.unconditional_logits, inputs.sequences, inputs.mask),
        )
        batch = logits.shape[0]
        draft_columns = self.max_draft + 1
        recorded = (batch, new_token_bucket + draft_columns, logits.shape[2])
        padding = ((0, 0), (0, draft_columns))
        state = AssistedState(
            sequences=jnp.pad(sequences, padding, constant_values=settings.pad),
            mask=jnp.pad(mask, padding),
            cur_len=jnp.full((batch,), inputs.start_len, jnp.int32),
            start_len=inputs.start_len,
            is_finished=jnp.zeros((batch,), bool),
            keys=inputs.keys,
            step=jnp.zeros((), jnp.int32),
            first_nonfinite_step=jnp.full((batch,), NEVER, jnp.int32),
            cache=cache.replace(length=repeat_for_samples(inputs.cache_len, batch)),
            draft=self.draft.init(model, inputs, cache.capacity, self.num_return_sequences),
            counts=AssistedCounts(
                drafted=jnp.zeros((batch,), jnp.int32),
                accepted=jnp.zeros((batch,), jnp.int32),
                target_calls=jnp.ones((batch,), jnp.int32),
                num_assistant_tokens=jnp.full((batch,), self.num_assistant_tokens, jnp.int32),
            ),
            scores=jnp.zeros(recorded, logits.dtype) if settings.keep_scores else None,
            logits=jnp.zeros(recorded, logits.dtype) if settings.keep_logits else None,
            records=initial_records(
                out, self.num_return_sequences, recorded[1], **settings.decode_options
            ),
        )
        scores = process_columns(state.buffer, logits, unconditional, state.start_len, settings)
        token = self.select(state, scores)
        one = jnp.ones((batch,), jnp.int32)
        return append_columns(state, token, one, logits, scores, settings)[0]

    def step(self, model: Decoder, state: AssistedState, settings: DecodeSettings) -> AssistedState:
        unfinished = unfinished_rows(state, settings.max_length)
        proposal = self.propose(model, state, unfinished, settings)
        drafted, buffer = proposal.drafted, proposal.buffer
        newest = jnp.take_along_axis(state.sequences, state.cur_len[:, None] - 1, axis=1)
        real = unfinished[:, None] & (jnp.arange(self.max_draft + 1) <= drafted.size[:, None])
        out = model.decode(
            jnp.concatenate([newest, drafted.tokens], axis=1),
            real,
            proposal.cache,
            **settings.decode_options,
        )
        if state.records is not None:
            steps = state.cur_len - state.start_len
            state = state.replace(records=state.records.write_columns(out, steps))
        scores = process_columns(
            buffer, out.logits, out.unconditional_logits, state.start_len, settings
        )
        tokens, accepted = self.verify(state, drafted, scores)
        usable = jnp.where(unfinished, accepted + 1, 0)
        # The drafts are in these buffers already, so the result is written in place.
        state = state.replace(sequences=buffer.sequences, mask=buffer.mask)
        after, new = append_columns(state, tokens, usable, out.logits, scores, settings)
        length = state.cache.length + new
        return after.replace(
            step=state.step + 1,
            cache=out.cache.truncate(length),
            draft=self.draft.drop_rejected(proposal.draft_state, length),
            counts=self.updated_counts(state.counts, unfinished, drafted.size, accepted, new),
        )

    def propose(
        self,
        model: Decoder,
        state: AssistedState,
        unfinished: Bool[Array, " B"],
        settings: DecodeSettings,
    ) -> Proposal:
        """The draft of a round, for the unfinished rows."""
        num_tokens = jnp.minimum(state.counts.num_assistant_tokens, self.max_draft)
        limit = jnp.minimum(num_tokens, settings.max_length - state.cur_len - 1)
        # Functions on the host recognise a finished row by a pad at its end.
        buffer = dataclasses.replace(state.buffer, cur_len=state.cur_len + ~unfinished)
        return self.draft.propose(
            DraftInputs(
                model=model,
                buffer=buffer,
                cache=state.cache,
                draft_state=state.draft,
                limit=jnp.where(unfinished, limit, 0),
                choose=lambda scores, column: self.propose_token(state, scores, column),
                prompt_len=state.start_len,
                settings=settings,
                max_draft=self.max_draft,
                keep_scores=self.is_speculative or self.ensemble_weight is not None,
            )
        )

    def verify(
        self, state: AssistedState, drafted: DraftTokens, scores: Float[Array, "B C V"]
    ) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
        """The tokens of a round, and the number of accepted drafted ones among them."""
        if self.is_speculative:
            positions = state.cur_len - state.start_len
            return accept_speculative(state.keys, positions, drafted, scores, self.ensemble_weight)
        if self.ensemble_weight is not None:
            scores = mix_with_draft(scores, drafted, self.ensemble_weight)
        return accept_matching(self.select(state, scores), drafted)

    @property
    def is_speculative(self) -> bool:
        """True if acceptance compares the probabilities of the model and the draft."""
        return self.sampling and self.draft.has_scores

    def select(self, state: AssistedState, scores: Float[Array, "B T V"]) -> Int[Array, "B T"]:
        """The model's own choices for the columns from `cur_len` on; samples equal those of
        plain sampling."""
        batch, width, _ = scores.shape
        flat = scores.reshape(batch * width, -1)
        if not self.sampling:
            return choose_greedy(flat).reshape(batch, width)
        positions = (state.cur_len - state.start_len)[:, None] + jnp.arange(width)
        keys = position_keys(jnp.repeat(state.keys, width, axis=0), positions.reshape(-1))
        return choose_sample(keys, flat).reshape(batch, width)

    def propose_token(
        self, state: AssistedState, scores: Float[Array, "B V"], column: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        """The draft's token for each row's `column`."""
        if not self.sampling:
            return choose_greedy(scores)
        return choose_sample(position_keys(state.keys, column - state.start_len, DRAFT), scores)

    def updated_counts(
        self,
        counts: AssistedCounts,
        unfinished: Bool[Array, " B"],
        drafted: Int[Array, " B"],
        accepted: Int[Array, " B"],
        new: Int[Array, " B"],
    ) -> AssistedCounts:
        """The counts after a round, and the schedule's next number of tokens."""
        size = counts.num_assistant_tokens
        longest = jnp.maximum(size, self.max_draft)
        next_size = jnp.where(
            accepted == drafted, jnp.minimum(size + 2, longest), jnp.maximum(size - 1, 1)
        )
        return AssistedCounts(
            drafted=counts.drafted + drafted,
            accepted=counts.accepted + jnp.minimum(accepted, new),
            target_calls=counts.target_calls + unfinished.astype(jnp.int32),
            num_assistant_tokens=jnp.where(unfinished & self.grows, next_size, size),
        )

    def finish(self, state: AssistedState, settings: DecodeSettings) -> Result:
        unfinished = unfinished_rows(state, settings.max_length)
        longest = jnp.max(state.cur_len)
        length = jnp.min(jnp.where(unfinished, state.cur_len, longest))

        def by_step(record: Array | None) -> Array | None:
            return None if record is None else record.swapaxes(0, 1)

        written = jnp.arange(state.sequences.shape[1]) < state.cur_len[:, None]
        return Result(
            sequences=jnp.where(written, state.sequences, settings.pad),
            longest=longest,
            length=length,
            steps=length - state.start_len,
            first_nonfinite_step=state.first_nonfinite_step,
            scores=by_step(state.scores),
            logits=by_step(state.logits),
            records=state.records,
            assisted=state.counts,
        )
