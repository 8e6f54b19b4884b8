"""State of assisted generation, and functions that process and append the tokens of a round.

Every row has its own length. Other strategies process one column per step; the functions here
process T columns of each row, from the row's length on. `assisted.py` has the rounds themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.cache.kv_cache import Cache, write_columns
from jaxllm.generation.strategies.assisted.drafts import DraftState, TokenBuffer
from jaxllm.generation.strategies.records import Records
from jaxllm.generation.strategies.strategy import (
    NEVER,
    AssistedCounts,
    DecodeSettings,
    is_eos,
    nonfinite,
)
from jaxllm.parallel.field_axes import axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssistedState:
    """State of assisted generation, donated to the loop. Every row has its own length."""

    sequences: Int[Array, "B L"]
    """Prompt and new tokens, pad beyond `cur_len`."""
    mask: Bool[Array, "B L"]
    """True at real tokens of `sequences`."""
    cur_len: Int[Array, " B"]
    """Columns in use, prompt included."""
    start_len: Int[Array, ""]
    """Columns of the prompt."""
    is_finished: Bool[Array, " B"]
    """True if the row is finished."""
    keys: Key[Array, " B"]
    """One random key per row; draws depend only on it and on the position of the token."""
    step: Int[Array, ""]
    """Rounds so far (not new tokens: rows accept different numbers of drafts)."""
    first_nonfinite_step: Int[Array, " B"]
    """The first new token without finite logits, or -1."""
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
    def buffer(self) -> TokenBuffer:
        return TokenBuffer(self.sequences, self.mask, self.cur_len)


def repeat_for_columns(buffer: TokenBuffer, width: int) -> TokenBuffer:
    """Repeats each sequence for `width` columns from `cur_len` on; a copy ends before its column:
    [B * width, L]."""
    columns = buffer.cur_len[:, None] + jnp.arange(width, dtype=jnp.int32)
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
    """Writes each row's first `usable` tokens, up to an end token, and pads over the others.

    Args:
        usable: accepted drafted tokens, and the model's own after them; 0 in finished rows.

    Returns:
        The state, and the number of tokens that each row got.
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    is_usable = columns < usable[:, None]
    buffer = state.buffer.put(tokens, is_usable)
    finishes = is_eos(tokens, settings.eos) | stopped_columns(buffer, scores, settings)
    finishes &= is_usable
    row_finishes = finishes.any(axis=1)
    new = jnp.where(row_finishes, jnp.argmax(finishes, axis=1).astype(jnp.int32) + 1, usable)
    is_new = columns < new[:, None]
    position = state.cur_len - state.start_len
    first_nonfinite_step = state.first_nonfinite_step
    if not settings.allow_nonfinite:
        is_bad = nonfinite(logits, scores) & is_new
        bad_step = position + jnp.argmax(is_bad, axis=1).astype(jnp.int32)
        first_nonfinite_step = jnp.where(
            is_bad.any(axis=1) & (first_nonfinite_step == NEVER), bad_step, first_nonfinite_step
        )

    def write(steps: Array | None, values: Array) -> Array | None:
        if steps is None:
            return None
        return write_columns(steps, jnp.where(is_new[..., None], values, 0.0), position)

    buffer = state.buffer.put(jnp.where(is_new, tokens, settings.pad), is_new)
    after = state.replace(
        sequences=buffer.sequences,
        mask=buffer.mask,
        cur_len=state.cur_len + new,
        is_finished=state.is_finished | row_finishes,
        first_nonfinite_step=first_nonfinite_step,
        scores=write(state.scores, scores),
        logits=write(state.logits, logits),
    )
    return after, new
