"""State of the beam strategies, candidates for the next beams, and updates of the state."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam.beam_cache import BeamCache
from jaxllm.generation.strategies.beam.hypotheses import (
    WORST,
    Count,
    Hypotheses,
    largest,
    take_per_row,
)
from jaxllm.generation.strategies.records import Records
from jaxllm.generation.strategies.strategy import DecodeSettings, is_eos
from jaxllm.generation.strategies.token_choice import draw_without_replacement
from jaxllm.parallel.field_axes import axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamState:
    """State of a beam strategy.

    The rows of a call advance together. In batch slots, where rows begin at different times, each
    has its own `start_len`, `cur_len` and `step`.
    """

    running: Hypotheses
    """Running beams. Scores are sums of log-probabilities."""
    finished: Hypotheses
    """The pool: the best finished sequences, best first. Scores include the length penalty."""
    mask: Bool[Array, "B L"]
    """True at real columns of the sequences, the same for all beams of a row."""
    start_len: Count
    """Columns of the prompt."""
    cur_len: Count
    """Columns in use, prompt included."""
    step: Count
    """Number of new tokens so far."""
    is_finished: Bool[Array, " B"]
    """True if no running beam of the row can enter the pool any more."""
    keys: Key[Array, " B"]
    """One random key per row; step t draws with fold_in(key, t)."""
    first_nonfinite_step: Int[Array, " B"]
    """The first step without finite logits, or -1."""
    beam_cache: BeamCache
    """Keys and values of the prompt and of every beam."""
    scores: Float[Array, "T BN V"] | None = dataclasses.field(
        default=None, metadata=axes(None, "rows")
    )
    """Processed scores of every step and beam (`output_scores`); of constrained beams with the
    beams' sums added, as in transformers."""
    logits: Float[Array, "T BN V"] | None = dataclasses.field(
        default=None, metadata=axes(None, "rows")
    )
    """Raw logits of every step and beam (`output_logits`)."""
    records: Records | None = dataclasses.field(default=None, metadata=axes(None, "rows"))
    """Hidden states and attentions, one row for each running beam."""

    @property
    def cache(self) -> Cache:
        return self.beam_cache.cache

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


S = TypeVar("S", bound=BeamState)


def beam_scores(
    state: BeamState,
    running: Hypotheses,
    logits: Float[Array, "BM V"],
    unconditional: Float[Array, "BM V"] | None,
    settings: DecodeSettings,
    **group: Any,
) -> Float[Array, "BM V"]:
    """Log-probabilities of the next tokens of M running beams, after the logits processors.

    Args:
        group: further keywords of the processors (diverse beam search).
    """
    batch, beams = running.scores.shape
    return settings.processors(
        running.sequences.reshape(batch * beams, -1),
        jax.nn.log_softmax(logits),
        state.cur_len,
        mask=jnp.repeat(state.mask, beams, axis=0),
        prompt_len=state.start_len,
        unconditional_logits=unconditional,
        **group,
    )


def advance(state: S, running: Hypotheses, parents: Int[Array, "B N"], **changes: Any) -> S:
    """The state one column later, with the beams `running`, which continue `parents`."""
    return state.replace(
        running=running,
        beam_cache=state.beam_cache.select(parents),
        mask=extended_mask(state),
        cur_len=state.cur_len + 1,
        step=state.step + 1,
        **changes,
    )


def extended_mask(state: BeamState) -> Bool[Array, "B L"]:
    """`mask` with the next column added."""
    return state.mask | (jnp.arange(state.mask.shape[1]) == state.cur_len[..., None])


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The K best continuations of a row's beams, best first (sampling: in the order drawn)."""

    value: Float[Array, "B K"]
    """Sums of log-probabilities."""
    beam: Int[Array, "B K"]
    """The beam that is continued."""
    token: Int[Array, "B K"]
    finishes: Bool[Array, "B K"]
    """True if the continuation ends with an end token; beam search adds full and stopped ones."""
    unused: Bool[Array, " K"] | Bool[Array, "B K"]
    """True beyond the number of candidates that the actual end tokens require."""

    def next_beams(
        self, count: int
    ) -> tuple[Float[Array, "B count"], Int[Array, "B count"], Int[Array, "B count"]]:
        """The `count` best continuations that do not finish: their values, beams and tokens."""
        value, index = largest(
            self.value + jnp.where(self.finishes | self.unused, WORST, 0.0), count
        )
        return value, take_per_row(self.beam, index), take_per_row(self.token, index)


def best_candidates(
    total: Float[Array, "B N V"],
    state: BeamState,
    settings: DecodeSettings,
    *,
    sampling: bool = False,
) -> Candidates:
    """The best continuations of each row's beams, or with `sampling` a draw among them.

    They include N that do not finish, even if every beam ends with every end token. Their number is
    static, from the size of the end-token table; those that are not needed are `unused`.

    Args:
        total: sum of log-probabilities for each beam and next token.
    """
    batch, beams, vocab = total.shape
    flat = total.reshape(batch, -1)
    count = min(max(2, 1 + settings.eos.shape[-1]), vocab) * beams
    needed = jnp.maximum(2, 1 + jnp.sum(settings.eos >= 0, axis=-1)) * beams
    if sampling:
        step = jnp.broadcast_to(state.step, state.keys.shape)
        keys = jax.vmap(jax.random.fold_in)(state.keys, step)
        value, index = draw_without_replacement(keys, flat, count, needed, worst=WORST)
    else:
        value, index = largest(flat, count)
    token = index % vocab
    return Candidates(
        value=value,
        beam=index // vocab,
        token=token,
        finishes=is_eos(token, settings.eos),
        unused=jnp.arange(count) >= needed[..., None],
    )
