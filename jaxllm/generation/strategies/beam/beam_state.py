"""Base class of the beam strategies: state, candidates for the next beams, and the result."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam.beam_cache import BeamCache
from jaxllm.generation.strategies.beam.hypotheses import (
    WORST,
    Count,
    Hypotheses,
    column,
    global_indices,
    largest,
    result_length,
)
from jaxllm.generation.strategies.records import Records, initial_records
from jaxllm.generation.strategies.sample import with_score_buffers, write_step
from jaxllm.generation.strategies.strategy import (
    NEVER,
    DecodeSettings,
    PrefillInputs,
    Result,
    ReturnedCache,
    Strategy,
    note_nonfinite,
)
from jaxllm.generation.strategies.token_choice import draw_without_replacement
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamStrategy(Strategy[S]):
    """Base class of the beam strategies, which define `choose`. A row is finished when its pool
    cannot change any more."""

    length_penalty: Float[Array, ""] | Float[Array, " B"]
    """Scores are divided by length ** length_penalty; one number per row in batch slots."""
    num_beams: int = dataclasses.field(metadata={"static": True})
    num_return_sequences: int = dataclasses.field(metadata={"static": True})
    """Number of sequences returned per row, at most `num_beams`."""
    early_stopping: bool | str = dataclasses.field(metadata={"static": True})
    """Condition for a full pool to be final. True: at once; False: no beam of the present length
    can enter it; "never": no beam of any length can."""

    can_stream: ClassVar[bool] = False

    def cache_slots(self, new_tokens: int) -> int:
        return self.num_beams * new_tokens

    def choose(
        self,
        state: S,
        logits: Float[Array, "BN V"],
        unconditional: Float[Array, "BN V"] | None,
        settings: DecodeSettings,
    ) -> S:
        """Chooses the next beams and updates the pool.

        Args:
            logits: raw logits of all beams.
            unconditional: logits of their unconditional contexts; None without guidance.
        """
        raise NotImplementedError

    def initial_fields(
        self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int, starts: Bool[Array, " N"]
    ) -> dict[str, Any]:
        """The fields of a state before the first choice.

        Args:
            cache: the cache after prefill.
            starts: beams that the first choice is made from. All beams hold the same sequence so
                far, and equal beams would give equal continuations.
        """
        batch = inputs.mask.shape[0]
        return {
            "running": Hypotheses.init(
                inputs, self.num_beams, new_token_bucket, jnp.where(starts, 0.0, WORST)
            ),
            "finished": Hypotheses.init(
                inputs, self.num_beams, new_token_bucket, jnp.full((self.num_beams,), WORST)
            ),
            "mask": jnp.asarray(inputs.mask),
            "start_len": jnp.asarray(inputs.start_len),
            "cur_len": jnp.asarray(inputs.start_len),
            "step": jnp.zeros_like(inputs.start_len, jnp.int32),
            "is_finished": jnp.zeros((batch,), bool),
            "keys": inputs.keys,
            "first_nonfinite_step": jnp.full((batch,), NEVER, jnp.int32),
            "beam_cache": BeamCache.init(cache, batch, self.num_beams),
        }

    def choose_first(
        self, state: S, out: DecodeOutput, settings: DecodeSettings, new_token_bucket: int
    ) -> S:
        """Chooses the first beams, from the output of prefill."""
        width = out.cache.capacity - (self.num_beams - 1) * new_token_bucket
        records = initial_records(
            out, self.num_beams, new_token_bucket, width=width, **settings.decode_options
        )
        logits, unconditional = jax.tree.map(
            lambda x: jnp.repeat(x[:, 0], self.num_beams, axis=0),
            (out.logits, out.unconditional_logits),
        )
        state = with_score_buffers(state, logits, settings, new_token_bucket)
        return self.choose(state.replace(records=records), logits, unconditional, settings)

    def step(self, model: Decoder, state: S, settings: DecodeSettings) -> S:
        newest = column(state.running.sequences, state.cur_len - 1)
        out, beam_cache = state.beam_cache.decode(model, newest, **settings.decode_options)
        if state.records is not None:
            records = state.records.write_branches(out, state.step, beam_cache.columns)
            state = state.replace(records=records)
        logits, unconditional = jax.tree.map(
            lambda x: x.reshape(-1, x.shape[-1]), (out.logits, out.unconditional_logits)
        )
        return self.choose(state.replace(beam_cache=beam_cache), logits, unconditional, settings)

    def ranked(self, state: S) -> Hypotheses:
        """Finished sequences, and unfinished ones that may be returned, best first."""
        return state.finished

    def best(self, state: S) -> Hypotheses:
        """The sequences that are returned."""
        return self.ranked(state).beams(slice(self.num_return_sequences))

    def finish(self, state: S, settings: DecodeSettings) -> Result:
        best = self.best(state)
        return Result(
            sequences=best.sequences.reshape(-1, best.sequences.shape[2]),
            length=result_length(best.beam_indices, state.start_len),
            steps=state.step,
            first_nonfinite_step=state.first_nonfinite_step,
            scores=state.scores,
            logits=state.logits,
            sequences_scores=best.scores.reshape(-1),
            beam_indices=global_indices(best.beam_indices, self.num_beams),
            records=state.records,
        )

    def returned_cache(self, state: S) -> ReturnedCache:
        return _returned_cache(self, state)


@jax.jit
def _returned_cache(strategy: BeamStrategy[Any], state: BeamState) -> ReturnedCache:
    best = strategy.best(state)
    lengths = state.start_len + jnp.sum(best.beam_indices >= 0, axis=2)
    written = jnp.arange(state.mask.shape[1]) < lengths[..., None]
    mask = (state.mask[:, None] & written).reshape(-1, state.mask.shape[1])
    sequences = best.sequences.reshape(mask.shape)
    return ReturnedCache(state.beam_cache.sequence_cache(best.beam_indices), sequences, mask)


def record_step(
    state: S,
    unfinished: Bool[Array, " B"],
    logits: Float[Array, "BN V"],
    scores: Float[Array, "BN V"],
    settings: DecodeSettings,
) -> S:
    """Records scores and logits of this step, and `first_nonfinite_step`."""
    first_nonfinite_step = state.first_nonfinite_step
    if not settings.allow_nonfinite:
        rows = (unfinished.shape[0], -1)
        first_nonfinite_step = note_nonfinite(
            first_nonfinite_step, state.step, unfinished, logits.reshape(rows), scores.reshape(rows)
        )
    return state.replace(
        scores=write_step(state.scores, scores, state.step),
        logits=write_step(state.logits, logits, state.step),
        first_nonfinite_step=first_nonfinite_step,
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


def candidates(
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
        finishes=jnp.any(token[..., None] == settings.eos[..., None, :], axis=-1),
        unused=jnp.arange(count) >= needed[..., None],
    )
