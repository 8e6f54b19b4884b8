"""Assisted (speculative) generation: a draft proposes tokens, one pass of the model checks them.

Like `_assisted_decoding` of transformers 5.23, but for batches: rows accept different numbers of
drafted tokens and so have different lengths. Rejected tokens stay in the buffers beyond each row's
length. Greedy results are those of greedy search; samples are distributed as without the draft.
Other strategies process one column per step; here a step processes T columns of each row, from the
row's length on.

There are two rules of acceptance. `accept_matching` accepts drafted tokens while they equal the
model's own choices. `accept_speculative` accepts them at random, such that tokens have the model's
distribution with any draft (Leviathan et al. 2022, arXiv:2211.17192, algorithm 1; Chen et al. 2023,
arXiv:2302.01318).

B: batch size. G: columns of a draft. C = G + 1. V: vocabulary size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxllm.cache.kv_cache import Cache, write_columns
from jaxllm.generation.strategies.drafts import (
    Draft,
    DraftInputs,
    DraftState,
    DraftTokens,
    Proposal,
    TokenBuffer,
    repeat_for_samples,
)
from jaxllm.generation.strategies.draws import choose_greedy, choose_sample
from jaxllm.generation.strategies.records import Records, initial_records
from jaxllm.generation.strategies.strategy import (
    NONFINITE,
    RUNNING,
    AssistedCounts,
    DecodeSettings,
    PrefillInputs,
    Result,
    Strategy,
    end_reasons,
    nonfinite,
)
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.field_axes import axes

# Each position has a key for each purpose, so that its draws are independent of each other.
DRAFT, ACCEPT, RESIDUAL = range(3)


def position_keys(
    keys: Key[Array, " B"], positions: Int[Array, " B"], purpose: int | None = None
) -> Key[Array, " B"]:
    """Random keys for the new token at each row's position, for one purpose.

    Without a purpose they are the keys that plain sampling uses for those tokens.
    """
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return (
        keys if purpose is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, purpose)
    )


def accepted_prefix(matches: Bool[Array, "B G"], count: Int[Array, " B"]) -> Int[Array, " B"]:
    """Number of leading True values among the first `count` of each row.

    >>> import jax.numpy as jnp
    >>> accepted_prefix(jnp.array([[True, True, False, True]]), jnp.array([4])).tolist()
    [2]
    """
    valid = jnp.arange(matches.shape[1])[None] < count[:, None]
    return jnp.sum(jnp.cumprod(matches & valid, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def mix_with_draft(
    scores: Float[Array, "B C V"], drafted: DraftTokens, weight: Float[Array, ""]
) -> Float[Array, "B C V"]:
    """The mixture ``weight * p + (1 - weight) * q`` of model and draft, for each drafted token; p
    for the token after them (`assistant_ensemble_weight`, arXiv:2604.07622)."""
    assert drafted.scores is not None
    p, q = jax.nn.softmax(scores, axis=-1), jax.nn.softmax(drafted.scores, axis=-1)
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    valid = jnp.arange(p.shape[1])[None] < drafted.size[:, None]
    return jnp.where(valid[..., None], weight * p + (1 - weight) * q, p)


def accept_matching(
    selected: Int[Array, "B C"], drafted: DraftTokens
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """The model's own choices, and the number of drafted tokens that are accepted.

    If the choices are samples, this is the speculative rule for drafts of probability one: a
    token d is accepted with probability p(d), and its replacement is drawn from the others.
    """
    return selected, accepted_prefix(selected[:, :-1] == drafted.tokens, drafted.size)


def accept_speculative(
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    drafted: DraftTokens,
    scores: Float[Array, "B C V"],
    weight: Float[Array, ""] | None = None,
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """Accepts a drafted token x with probability min(1, p(x) / q(x)), up to the first rejection.

    The next token is drawn from norm(max(p - q, 0)), or from p if all were accepted. p and q are
    the softmax of the model's and the draft's processed scores.

    Args:
        keys: one per row; draws depend only on it and on the new token's position.
        positions: number of new tokens of each row so far.
        drafted: a draft with scores.
        scores: the model's scores, after the newest token and after each drafted one.
        weight: weight of p; a draft is then accepted as if ``weight * p + (1 - weight) * q`` were
            the model's distribution, and tokens are no longer distributed as the model's.

    Returns:
        The tokens, and the number of accepted ones; tokens beyond the next one are filler.
    """
    width = drafted.tokens.shape[1]
    columns = jnp.arange(width, dtype=jnp.int32)[None]
    assert drafted.scores is not None
    p, q = jax.nn.softmax(scores, axis=-1), jax.nn.softmax(drafted.scores, axis=-1)
    p_draft = _probability_of(p[:, :width], drafted.tokens)
    q_draft = _probability_of(q, drafted.tokens)
    accept_keys = position_keys(
        jnp.repeat(keys, width, axis=0), (positions[:, None] + columns).reshape(-1), ACCEPT
    )
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(accept_keys)
    # Not <=: a draft that the model forbids must not be accepted at a random number of exactly 0.
    mixture = p_draft if weight is None else weight * p_draft + (1 - weight) * q_draft
    accepted = accepted_prefix(uniform.reshape(q_draft.shape) * q_draft < mixture, drafted.size)

    p_next = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    q_next = jnp.take_along_axis(q, jnp.minimum(accepted, width - 1)[:, None, None], axis=1)[:, 0]
    residual = jnp.maximum(p_next - jnp.where((accepted < drafted.size)[:, None], q_next, 0.0), 0.0)
    # With the mixture in place of p it is the same distribution: weight * (p - q), normalised.
    # If p = q up to rounding, no entry of p - q is positive.
    residual = jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, p_next)
    token = choose_sample(position_keys(keys, positions + accepted, RESIDUAL), jnp.log(residual))
    tokens = jnp.pad(drafted.tokens, ((0, 0), (0, 1)))
    return jnp.where(
        jnp.arange(width + 1)[None] == accepted[:, None], token[:, None], tokens
    ), accepted


def _probability_of(p: Float[Array, "B G V"], tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
    return jnp.take_along_axis(p, tokens[..., None], axis=2)[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssistedState:
    """State of assisted generation, donated to the loop. Every row has its own length."""

    sequences: Int[Array, "B L"]
    """Prompt and new tokens, pad beyond `cur_len`."""
    mask: Bool[Array, "B L"]
    """True at real tokens of `sequences`."""
    start_len: Int[Array, ""]
    """Columns of the prompt."""
    count: Int[Array, " B"]
    """New tokens of each row, the end token included."""
    reason: Int[Array, " B"]
    """`RUNNING`, or why the row has ended."""
    keys: Key[Array, " B"] | UInt32[Array, "B _"]
    """One random key per row; draws depend only on it and on the position of the token."""
    step: Int[Array, ""]
    """Rounds so far (not new tokens: rows accept different numbers of drafts)."""
    cache: Cache
    """The model's cache: all tokens of each row but the newest."""
    draft: DraftState
    """The draft's own state (`Draft.init`)."""
    counts: AssistedCounts
    scores: Float[Array, "B N V"] | None = None
    """Processed scores of every new token (`output_scores`)."""
    logits: Float[Array, "B N V"] | None = None
    """Raw logits of every new token (`output_logits`)."""
    records: Records | None = dataclasses.field(default=None, metadata=axes(None, "rows"))
    """Hidden states and attentions of every new token."""

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    @property
    def cur_len(self) -> Int[Array, " B"]:
        """Columns in use, prompt included."""
        return self.start_len + self.count

    @property
    def buffer(self) -> TokenBuffer:
        return TokenBuffer(self.sequences, self.mask, self.cur_len)


def repeat_for_columns(buffer: TokenBuffer, width: int) -> TokenBuffer:
    """Repeats each sequence for `width` columns from `cur_len` on; a copy ends before its column:
    [B * width, L]."""
    columns = buffer.cur_len[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return TokenBuffer(
        jnp.repeat(buffer.sequences, width, axis=0),
        jnp.repeat(buffer.mask, width, axis=0),
        columns.reshape(-1),
    )


def process_columns(
    buffer: TokenBuffer,
    logits: Float[Array, "B T V"],
    unconditional: Float[Array, "B T V"] | None,
    prompt_len: Int[Array, ""],
    settings: DecodeSettings,
) -> Float[Array, "B T V"]:
    """Processed scores of T adjacent columns, each with the tokens before it as its history."""
    batch, width, vocabulary = logits.shape
    before = repeat_for_columns(buffer, width)
    if unconditional is not None:
        unconditional = unconditional.reshape(batch * width, vocabulary)
    scores = settings.processors(
        before.sequences,
        logits.reshape(batch * width, vocabulary),
        before.cur_len,
        mask=before.mask,
        prompt_len=prompt_len,
        columns=width,
        unconditional_logits=unconditional,
    )
    return scores.reshape(logits.shape)


def stopped_columns(
    buffer: TokenBuffer, scores: Float[Array, "B T V"], settings: DecodeSettings
) -> Bool[Array, "B T"]:
    """True where a stopping criterion ends a row, for T new columns written from `cur_len` on."""
    batch, width, vocabulary = scores.shape
    before = repeat_for_columns(buffer, width)
    ends = settings.stops(
        before.sequences,
        scores.reshape(batch * width, vocabulary),
        before.cur_len + 1,
        mask=before.mask,
    )
    return ends.reshape(batch, width)


def append_columns(
    state: AssistedState,
    tokens: Int[Array, "B T"],
    usable: Int[Array, " B"],
    logits: Float[Array, "B T V"],
    scores: Float[Array, "B T V"],
    settings: DecodeSettings,
) -> tuple[AssistedState, Int[Array, " B"]]:
    """Writes each row's first `usable` tokens, up to the one that ends the row, and pads over the
    others.

    Args:
        usable: accepted drafted tokens, and the model's own after them; 0 in finished rows.

    Returns:
        The state, and the number of tokens that each row got.
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_usable = columns < usable[:, None]
    buffer = state.buffer.put(tokens, is_usable)
    is_full = state.cur_len[:, None] + columns + 1 >= settings.max_length
    is_stopped = stopped_columns(buffer, scores, settings)
    reasons = end_reasons(tokens, is_full, is_stopped, settings)
    if not settings.allow_nonfinite:
        reasons = jnp.where(nonfinite(logits, scores), NONFINITE, reasons)
    ends = (reasons != RUNNING) & is_usable
    row_ends, end = ends.any(axis=1), jnp.argmax(ends, axis=1)[:, None]
    reason = jnp.take_along_axis(reasons, end, axis=1)[:, 0]
    # Without finite logits there is no token.
    up_to_end = end[:, 0].astype(jnp.int32) + (reason != NONFINITE).astype(jnp.int32)
    new = jnp.where(row_ends, up_to_end, usable)
    is_new = columns < new[:, None]

    def write(steps: Array | None, values: Array) -> Array | None:
        if steps is None:
            return None
        return write_columns(steps, jnp.where(is_new[..., None], values, 0.0), state.count)

    buffer = state.buffer.put(jnp.where(is_new, tokens, settings.pad), is_new)
    after = state.replace(
        sequences=buffer.sequences,
        mask=buffer.mask,
        count=state.count + new,
        reason=jnp.where(row_ends, reason, state.reason),
        scores=write(state.scores, scores),
        logits=write(state.logits, logits),
    )
    return after, new


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
    def draws(self) -> bool:
        return self.sampling

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
            start_len=inputs.start_len,
            count=jnp.zeros((batch,), jnp.int32),
            reason=jnp.full((batch,), RUNNING, jnp.int32),
            keys=inputs.keys,
            step=jnp.zeros((), jnp.int32),
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
        unfinished = state.reason == RUNNING
        proposal = self.propose(model, state, unfinished, settings)
        drafted, buffer = proposal.drafted, proposal.buffer
        newest = jnp.take_along_axis(state.sequences, state.cur_len[:, None] - 1, axis=1)
        real = unfinished[:, None] & (jnp.arange(self.max_draft + 1)[None] <= drafted.size[:, None])
        out = model.decode(
            jnp.concatenate([newest, drafted.tokens], axis=1),
            real,
            proposal.cache,
            **settings.decode_options,
        )
        if state.records is not None:
            state = state.replace(records=state.records.write_columns(out, state.count))
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
        buffer = dataclasses.replace(
            state.buffer, cur_len=state.cur_len + (~unfinished).astype(jnp.int32)
        )
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
            return accept_speculative(
                state.keys, state.count, drafted, scores, self.ensemble_weight
            )
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
        positions = state.count[:, None] + jnp.arange(width)[None]
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
        longest = jnp.max(state.cur_len)
        length = jnp.min(jnp.where(state.reason == RUNNING, state.cur_len, longest))

        def by_step(record: Array | None) -> Array | None:
            return None if record is None else record.swapaxes(0, 1)

        written = jnp.arange(state.sequences.shape[1])[None] < state.cur_len[:, None]
        return Result(
            sequences=jnp.where(written, state.sequences, settings.pad),
            longest=longest,
            length=length,
            steps=length - state.start_len,
            lengths=state.count,
            finish_reasons=state.reason,
            scores=by_step(state.scores),
            logits=by_step(state.logits),
            records=state.records,
            assisted=state.counts,
        )
