"""Assisted (speculative) generation: a draft proposes tokens, one pass of the model checks them.

As `_assisted_decoding` of transformers 5.23, for batches, too: rows accept different numbers of
drafts and so have different lengths. What is rejected stays in the buffers, beyond each row's
length. Greedy results are those of greedy search; samples are distributed as without the draft.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.generation.strategies.assisted.acceptance import (
    DRAFT,
    ensemble,
    match,
    position_keys,
    speculative,
)
from jaxllm.generation.strategies.assisted.draft_loop import each_sample
from jaxllm.generation.strategies.assisted.drafts import Draft
from jaxllm.generation.strategies.assisted.state import AssistedState, accept, process
from jaxllm.generation.strategies.records import first_records
from jaxllm.generation.strategies.strategy import (
    NEVER,
    AssistedCounts,
    Result,
    Strategy,
)
from jaxllm.generation.strategies.token_choice import choose_greedy, choose_sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Assisted(Strategy[AssistedState]):
    """Rounds of a draft, its check, and one more token."""

    draft: Draft
    num_assistant_tokens: Int[Array, ""]
    growing: Bool[Array, ""]
    """The schedule is a heuristic: 2 more after a draft accepted whole, else 1 less."""
    sampling: bool = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})
    """Longest draft: a bucket, in which the number of tokens is traced."""
    count: int = dataclasses.field(default=1, metadata={"static": True})
    """Results a row."""
    ensemble_weight: Float[Array, ""] | None = None
    """Of the model, where drafts are judged by a mixture of it and the draft."""

    @property
    def samples(self) -> int:
        return self.count

    def slots(self, new: int) -> int:
        return new + self.most + 1  # a whole draft is written before it is cut

    def init(self, model, prompt, read, settings, room):
        cache = read.cache.repeat(self.count)
        both = (read.logits, read.unconditional_logits)
        logits, other = jax.tree.map(lambda x: jnp.repeat(x, self.count, axis=0), both)
        batch = logits.shape[0]
        kept = (batch, room + self.most + 1, logits.shape[2])
        spare = ((0, 0), (0, self.most + 1))
        state = AssistedState(
            sequences=jnp.pad(
                jnp.repeat(prompt.sequences, self.count, axis=0),
                spare,
                constant_values=settings.pad,
            ),
            mask=jnp.pad(jnp.repeat(prompt.mask, self.count, axis=0), spare),
            cur_len=jnp.full((batch,), prompt.start_len, jnp.int32),
            start_len=prompt.start_len,
            done=jnp.zeros((batch,), bool),
            keys=prompt.keys,
            step=jnp.zeros((), jnp.int32),
            first_nonfinite_step=jnp.full((batch,), NEVER, jnp.int32),
            cache=cache.replace(length=each_sample(prompt.columns, batch)),
            draft=self.draft.init(model, prompt, cache.capacity, self.count),
            counts=AssistedCounts(
                drafted=jnp.zeros((batch,), jnp.int32),
                accepted=jnp.zeros((batch,), jnp.int32),
                target_calls=jnp.ones((batch,), jnp.int32),
                num_assistant_tokens=jnp.full((batch,), self.num_assistant_tokens, jnp.int32),
            ),
            scores=jnp.zeros(kept, logits.dtype) if settings.keep_scores else None,
            logits=jnp.zeros(kept, logits.dtype) if settings.keep_logits else None,
            records=first_records(read, self.count, kept[1], **settings.decode_options),
        )
        first = read.replace(logits=logits, unconditional_logits=other)
        scores = process(state.text, first, state.start_len, settings)
        token = self.select(state, scores)
        state, _ = accept(state, token, jnp.ones((batch,), jnp.int32), logits, scores, settings)
        return state

    def step(self, model, state, settings):
        live = ~state.done & (state.cur_len < settings.max_length)
        wanted = jnp.minimum(state.counts.num_assistant_tokens, self.most)
        limit = jnp.minimum(wanted, settings.max_length - state.cur_len - 1)
        # A row that has ended shows a pad, by which functions on the host know it.
        shown = state.text._replace(cur_len=state.cur_len + ~live)
        by_chance = self.sampling and self.draft.has_scores
        drafted, text, cache, own = self.draft.propose(
            model,
            shown,
            state.cache,
            state.draft,
            jnp.where(live, limit, 0),
            lambda scores, column: self.propose_token(state, scores, column),
            state.start_len,
            settings,
            most=self.most,
            keep_scores=by_chance or self.ensemble_weight is not None,
        )
        newest = jnp.take_along_axis(state.sequences, state.cur_len[:, None] - 1, axis=1)
        real = live[:, None] & (jnp.arange(self.most + 1) <= drafted.size[:, None])
        read = model.decode(
            jnp.concatenate([newest, drafted.tokens], axis=1),
            real,
            cache,
            **settings.decode_options,
        )
        if state.records is not None:
            steps = state.cur_len - state.start_len
            state = state.replace(records=state.records.write_columns(read, steps))
        scores = process(text, read, state.start_len, settings)
        if by_chance:
            positions = state.cur_len - state.start_len
            tokens, kept = speculative(state.keys, positions, drafted, scores, self.ensemble_weight)
        else:
            judge = scores
            if self.ensemble_weight is not None:
                judge = ensemble(scores, drafted, self.ensemble_weight)
            tokens, kept = match(self.select(state, judge), drafted)

        usable = jnp.where(live, kept + 1, 0)
        # The buffers that the drafts were written to are those that the result is written to.
        state = state.replace(sequences=text.sequences, mask=text.mask)
        after, new = accept(state, tokens, usable, read.logits, scores, settings)
        length = state.cache.length + new
        return after.replace(
            step=state.step + 1,
            cache=read.cache.cut(length),
            draft=self.draft.keep(own, length),
            counts=self.counted(state.counts, live, drafted.size, kept, new),
        )

    def select(self, state: AssistedState, scores: Float[Array, "B T V"]) -> Int[Array, "B T"]:
        """The model's own choices from `cur_len` on; samples are those of plain sampling."""
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
        if not self.sampling:
            return choose_greedy(scores)
        return choose_sample(position_keys(state.keys, column - state.start_len, DRAFT), scores)

    def counted(
        self,
        counts: AssistedCounts,
        live: Bool[Array, " B"],
        drafted: Int[Array, " B"],
        kept: Int[Array, " B"],
        new: Int[Array, " B"],
    ) -> AssistedCounts:
        """The counts after a round, and the schedule's next number of tokens."""
        now = counts.num_assistant_tokens
        most = jnp.maximum(now, self.most)
        next_one = jnp.where(kept == drafted, jnp.minimum(now + 2, most), jnp.maximum(now - 1, 1))
        return AssistedCounts(
            drafted=counts.drafted + drafted,
            accepted=counts.accepted + jnp.minimum(kept, new),
            target_calls=counts.target_calls + live.astype(jnp.int32),
            num_assistant_tokens=jnp.where(live & self.growing, next_one, now),
        )

    def finish(self, state, settings):
        live = ~state.done & (state.cur_len < settings.max_length)
        longest = jnp.max(state.cur_len)
        ready = jnp.min(jnp.where(live, state.cur_len, longest))
        steps = ready - state.start_len

        def by_step(kept):
            return None if kept is None else kept.swapaxes(0, 1)

        written = jnp.arange(state.sequences.shape[1]) < state.cur_len[:, None]
        return Result(
            sequences=jnp.where(written, state.sequences, settings.pad),
            longest=longest,
            length=ready,
            steps=steps,
            first_nonfinite_step=state.first_nonfinite_step,
            scores=by_step(state.scores),
            logits=by_step(state.logits),
            records=state.records,
            assisted=state.counts,
        )
