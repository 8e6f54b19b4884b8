"""State of the beam strategies: sequences, KV cache, candidates for the next beams, and updates.

The beams of a row are decoded as columns of one row, not as rows of a batch. A beam attends to the
prompt and to its own ancestors. Selecting beams therefore gathers one row of booleans per beam:
keys and values are never copied, and those of the encoder are shared by all beams of a row. The
cost is that a beam computes attention scores for the generated slots of all beams. With beams as
batch rows as many slots would be read, and the prompt once per beam.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.draws import draw_without_replacement
from jaxllm.generation.strategies.records import Records
from jaxllm.generation.strategies.strategy import (
    LENGTH,
    RUNNING,
    DecodeSettings,
    Length,
    PrefillInputs,
    end_reasons,
    is_eos,
)
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.field_axes import axes
from jaxllm.parallel.sharding import context_mesh, partition_spec

WORST = -1e9
"""Score in place of minus infinity, as in transformers: sums stay finite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """N sequences per row, running or finished."""

    sequences: Int[Array, "B N L"]
    """int32. Prompt and new tokens."""
    beam_indices: Int[Array, "B N T"]
    """int32. The beam from which each new token was chosen; -1 after the end."""
    scores: Float[Array, "B N"]
    """float32. Sums of log-probabilities; in the pool with the length penalty applied."""
    count: Int[Array, "B N"]
    """int32. New tokens of each sequence, the end token included."""
    reason: Int[Array, "B N"]
    """int32. Why the sequence ends with its newest token, or `RUNNING`, as in places of the pool
    that hold no sequence."""

    def take(self, index: Int[Array, "B M"]) -> Hypotheses:
        return jax.tree.map(lambda x: take_per_row(x, index), self)

    def beams(self, beams: slice) -> Hypotheses:
        """The sequences of adjacent beams, such as those of a group."""
        return jax.tree.map(lambda x: x[:, beams], self)

    def extend(
        self,
        beam: Int[Array, "B M"],
        token: Int[Array, "B M"],
        scores: Float[Array, "B M"],
        state: BeamState,
        reason: Int[Array, "B M"] | int = RUNNING,
        offset: int = 0,
    ) -> Hypotheses:
        """M continuations, each of one beam with one token in the next column of the state.

        Args:
            reason: why each of them ends with its token, or `RUNNING`.
            offset: index of the first of these beams among all beams of a row (groups).
        """
        parents = self.take(beam)
        return Hypotheses(
            sequences=write_column(parents.sequences, token, state.cur_len),
            beam_indices=write_column(parents.beam_indices, beam + offset, state.step),
            scores=scores,
            count=parents.count + 1,
            reason=jnp.broadcast_to(jnp.asarray(reason, jnp.int32), beam.shape),
        )

    def join(self, *others: Hypotheses) -> Hypotheses:
        """The sequences of all, one after the other."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), self, *others)

    def best(self, count: int) -> Hypotheses:
        """The `count` sequences of the highest scores, in order."""
        return self.take(largest(self.scores, count)[1])

    @staticmethod
    def init(
        inputs: PrefillInputs, beams: int, new_token_bucket: int, scores: Float[Array, " N"]
    ) -> Hypotheses:
        """The prompt without new tokens, repeated for `beams` beams."""
        batch, length = inputs.sequences.shape
        sequences = jnp.asarray(inputs.sequences)[:, None]
        return Hypotheses(
            sequences=jnp.broadcast_to(sequences, (batch, beams, length)),
            beam_indices=jnp.full((batch, beams, new_token_bucket), -1, jnp.int32),
            scores=jnp.broadcast_to(scores, (batch, beams)),
            count=jnp.zeros((batch, beams), jnp.int32),
            reason=jnp.full((batch, beams), RUNNING, jnp.int32),
        )


def take_per_row(x: Array, index: Int[Array, "B M"]) -> Array:
    """x[b, index[b]] for each row b."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def largest(
    scores: Float[Array, "B M"], count: int
) -> tuple[Float[Array, "B count"], Int[Array, "B count"]]:
    """The `count` highest scores of each row, in order, and their indices.

    On a mesh every device computes its own rows: by default XLA all-gathers the rows first.
    """

    def largest_of(scores: Float[Array, "b M"]):
        value, index = jax.lax.top_k(scores, count)
        return value, index

    mesh = context_mesh()
    if mesh is not None:
        spec = partition_spec(scores.shape, ("rows",), mesh)
        return jax.shard_map(largest_of, in_specs=spec, out_specs=(spec, spec))(scores)
    # PERF(cpu): XLA sorts the whole row where it merges a later slice with the one inside top_k, a
    # hundred times slower; the barrier keeps them apart; benchmarks/generate.py. Not with several
    # devices, which a caller may use without a mesh of `make_mesh`: there XLA's partitioner splits
    # top_k in two and aborts at the barrier between them.
    if jax.device_count() > 1:
        return largest_of(scores)
    return jax.lax.optimization_barrier(largest_of(scores))


def write_column(
    x: Int[Array, "B M L"], value: Int[Array, "B M"], position: Length
) -> Int[Array, "B M L"]:
    """Writes one column of every sequence of a row."""
    if position.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(x, value[..., None], position, axis=2)
    put = jax.vmap(lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(x, new, i, axis=1))
    return put(x, value[..., None], position)


def read_column(x: Int[Array, "B M L"], position: Length) -> Int[Array, "B M"]:
    """Reads one column of every sequence of a row."""
    if position.ndim == 0:
        return jax.lax.dynamic_index_in_dim(x, position, 2, keepdims=False)
    return jnp.take_along_axis(x, position[:, None, None], axis=2)[..., 0]


def length_normalized(
    scores: Float[Array, " *any"],
    new_tokens: Int[Array, "*#any"],
    length_penalty: Float[Array, "*#any"],
) -> Float[Array, " *any"]:
    """Sums of log-probabilities divided by ``new_tokens ** length_penalty``."""
    divisor = new_tokens.astype(jnp.float32) ** length_penalty
    return scores / jnp.expand_dims(divisor, tuple(range(scores.ndim - divisor.ndim)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamCache:
    """KV cache with the prompt once and one slot per beam and step; immutable, like `Cache`."""

    cache: Cache
    seen: Bool[Array, "B N S"]
    """True at the slots that each beam attends to: the prompt and its ancestors."""
    prompt_slots: Length
    """Number of slots of the prompt."""
    prompt_len: Length
    """Columns of the prompt: `prompt_slots`, or fewer in rows of a continued conversation."""

    @staticmethod
    def init(cache: Cache, batch: int, beams: int) -> BeamCache:
        """Cache of beams after the prompt in `cache` (2 * batch rows with guidance)."""
        aligned = cache.align_lengths()
        seen = jnp.arange(cache.capacity)[None, None] < aligned.length.reshape(-1, 1, 1)
        seen = jnp.broadcast_to(seen, (batch, beams, cache.capacity))
        return BeamCache(aligned, seen, aligned.length, cache.length)

    @property
    def columns(self) -> Int[Array, " S"] | Int[Array, "B S"]:
        """The column that each slot belongs to."""
        slots, beams = jnp.arange(self.cache.capacity, dtype=jnp.int32), self.seen.shape[1]
        prompt = self.prompt_slots[..., None]
        slots = jnp.expand_dims(slots, tuple(range(prompt.ndim - 1)))
        step = jnp.maximum(slots - prompt, 0) // beams
        return jnp.where(slots < prompt, slots, self.prompt_len[..., None] + step)

    def decode(
        self, model: Decoder, tokens: Int[Array, "B N"], **options: Any
    ) -> tuple[DecodeOutput, BeamCache]:
        """Runs the model on the newest token of every beam, each in a slot of its own."""
        is_own_slot = jnp.arange(self.cache.capacity)[None, None] == (
            self.cache.length.reshape(-1, 1, 1) + jnp.arange(tokens.shape[1])[None, :, None]
        )
        branches = Branches(seen=self.seen | is_own_slot, columns=self.columns)
        out = model.decode(
            tokens, jnp.ones(tokens.shape, bool), self.cache, branches=branches, **options
        )
        return out, dataclasses.replace(self, cache=out.cache, seen=branches.seen)

    def select(self, parents: Int[Array, "B N"]) -> BeamCache:
        """Selects the next beams: beam n continues parents[:, n]."""
        return dataclasses.replace(self, seen=take_per_row(self.seen, parents))

    def sequence_cache(self, beam_indices: Int[Array, "B R T"]) -> Cache:
        """Plain cache with one row for each of a row's R sequences, without the other beams.

        The beam that a token was chosen from (`Hypotheses.beam_indices`) is the beam of the token
        before it, and so gives that token's slot. A sequence's last token is not in the cache.
        """
        batch, count, new_token_bucket = beam_indices.shape
        beams, slots = self.seen.shape[1], jnp.arange(self.cache.capacity)
        step, beam = jnp.divmod(slots - self.prompt_slots, beams)
        after = jnp.pad(beam_indices[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
        is_own_slot = (
            (after[..., jnp.clip(step, 0, new_token_bucket - 1)] == beam[None, None])
            & (step >= 0)[None, None]
            & (step < new_token_bucket)[None, None]
        )
        cache = self.cache.first_rows(batch)  # later rows are unconditional contexts
        in_prompt = (cache.mask & (slots < self.prompt_slots)[None])[:, None]
        mask = (in_prompt | is_own_slot).reshape(batch * count, -1)
        cache = cache.repeat(count)
        token_counts = jnp.sum(mask, axis=1, dtype=jnp.int32)
        width = self.cache.capacity - (beams - 1) * new_token_bucket
        return cache.replace(mask=mask, next_position=token_counts).compact(width)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamState:
    """State of a beam strategy."""

    running: Hypotheses
    """Running beams. Scores are sums of log-probabilities."""
    finished: Hypotheses
    """The pool: the best finished sequences, best first. Scores include the length penalty."""
    mask: Bool[Array, "B L"]
    """True at real columns of the sequences, the same for all beams of a row."""
    start_len: Length
    """Columns of the prompt."""
    cur_len: Length
    """Columns in use, prompt included."""
    step: Length
    """Steps so far: new tokens of each running beam."""
    count: Int[Array, " B"]
    """Steps of each row until it ended."""
    reason: Int[Array, " B"]
    """`RUNNING` while beams of the row may enter the pool; then `LENGTH`, whatever its sequences
    end with, or `NONFINITE`."""
    keys: Key[Array, " B"] | UInt32[Array, "B _"]
    """One key per row, as raw data in batch slots. Step t draws with fold_in(key, t)."""
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
        mask=jnp.repeat(state.mask, beams, axis=0) if settings.aligned else None,
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
        count=state.count + (state.reason == RUNNING).astype(jnp.int32),
        **changes,
    )


def end_rows(state: S, is_final: Bool[Array, " B"], settings: DecodeSettings) -> S:
    """Ends the rows whose pool is final, and the rows that have reached the limit."""
    ends = (state.reason == RUNNING) & (is_final | (state.cur_len >= settings.max_length))
    return state.replace(reason=jnp.where(ends, LENGTH, state.reason))


def beam_reasons(
    tokens: Int[Array, "B M"],
    state: BeamState,
    settings: DecodeSettings,
    is_stopped: Bool[Array, "B M"] | bool = False,
) -> Int[Array, "B M"]:
    """Why sequences of the rows end with these tokens in the next column, or `RUNNING`."""
    is_full = (state.cur_len + 1 >= settings.max_length).reshape(-1, 1)
    return end_reasons(tokens, is_full, is_stopped, settings)


def extended_mask(state: BeamState) -> Bool[Array, "B L"]:
    """`mask` with the next column added."""
    return state.mask | (jnp.arange(state.mask.shape[1])[None] == state.cur_len.reshape(-1, 1))


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
    unused: Bool[Array, "#B K"]
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
    needed = jnp.maximum(2, 1 + jnp.sum(settings.eos >= 0, axis=1)) * beams
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
        unused=jnp.arange(count)[None] >= needed[:, None],
    )
