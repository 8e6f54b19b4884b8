"""Base class of the beam strategies; beam search and beam sampling.

These two are as transformers 4.50 and later define them (`_beam_search`).

Each step takes the K best continuations of all N beams of a row. Those that end enter the pool of
finished sequences if they are among the best N; the best N of the others are the next beams.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam_state import (
    WORST,
    BeamCache,
    BeamState,
    Candidates,
    Hypotheses,
    S,
    advance,
    beam_reasons,
    beam_scores,
    best_candidates,
    end_rows,
    extended_mask,
    length_normalized,
    read_column,
    take_per_row,
)
from jaxllm.generation.strategies.records import initial_records
from jaxllm.generation.strategies.sample import record_step, with_score_buffers
from jaxllm.generation.strategies.strategy import (
    LENGTH,
    NONFINITE,
    RUNNING,
    STOP,
    DecodeSettings,
    Length,
    PrefillInputs,
    Result,
    ReturnedCache,
    Strategy,
)
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.sharding import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamStrategy(Strategy[S]):
    """Base class of the beam strategies, which define `initial_state` and `choose`. A row is
    finished when its pool cannot change any more."""

    length_penalty: Float[Array, ""] | Float[Array, " B"]
    """Scores are divided by length ** length_penalty; one number per row in batch slots."""
    num_beams: int = dataclasses.field(metadata={"static": True})
    num_return_sequences: int = dataclasses.field(metadata={"static": True})
    """Number of sequences returned per row, at most `num_beams`."""
    early_stopping: bool | str = dataclasses.field(metadata={"static": True})
    """Condition for a full pool to be final. True: at once; False: no beam of the present length
    can enter it; "never": no beam of any length can."""

    can_stream: ClassVar[bool] = False
    chooses_in_prefill: ClassVar[bool] = True

    @property
    def draws(self) -> bool:
        return False

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
            "count": jnp.zeros((batch,), jnp.int32),
            "reason": jnp.full((batch,), RUNNING, jnp.int32),
            "keys": inputs.keys,
            "beam_cache": BeamCache.init(cache, batch, self.num_beams),
        }

    def init(
        self,
        model: Decoder,
        inputs: PrefillInputs,
        out: DecodeOutput,
        settings: DecodeSettings,
        new_token_bucket: int,
    ) -> S:
        state = self.initial_state(inputs, out.cache, new_token_bucket)
        width = out.cache.capacity - (self.num_beams - 1) * new_token_bucket
        records = initial_records(
            out, self.num_beams, new_token_bucket, width=width, **settings.decode_options
        )
        logits, unconditional = jax.tree.map(
            lambda x: jnp.repeat(x[:, 0], self.num_beams, axis=0), whole_rows(out)
        )
        state = with_score_buffers(state, logits, settings, new_token_bucket)
        return self.choose(state.replace(records=records), logits, unconditional, settings)

    def step(self, model: Decoder, state: S, settings: DecodeSettings) -> S:
        newest = read_column(state.running.sequences, state.cur_len - 1)
        out, beam_cache = state.beam_cache.decode(model, newest, **settings.decode_options)
        if state.records is not None:
            records = state.records.write_branches(out, state.step, beam_cache.columns)
            state = state.replace(records=records)
        logits, unconditional = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), whole_rows(out))
        return self.choose(state.replace(beam_cache=beam_cache), logits, unconditional, settings)

    def extend_pool(
        self,
        state: S,
        running: Hypotheses,
        pool: Hypotheses,
        candidates: Candidates,
        enters: Bool[Array, "B M"],
        settings: DecodeSettings,
        *,
        offset: int = 0,
    ) -> tuple[Hypotheses, Bool[Array, " B"]]:
        """Adds the best M candidates that enter a pool of M sequences, as transformers'
        `BeamSearchScorer` and `BeamHypotheses.is_done` do (groups and constraints).

        Args:
            running: the beams that the candidates continue.
            offset: index of the first of these beams among all beams of a row (groups).

        Returns:
            The pool, and the rows in which it is full and can take no further beam.
        """
        length, size = state.cur_len + 1 - state.start_len, enters.shape[1]
        scores = length_normalized(candidates.value[:, :size], length, self.length_penalty)
        token = candidates.token[:, :size]
        new = running.extend(
            candidates.beam[:, :size],
            token,
            jnp.where(enters, scores, WORST),
            state,
            beam_reasons(token, state, settings),
            offset,
        )
        pool = pool.join(new).best(size)
        worst = pool.scores[:, -1]
        is_full = worst > WORST
        if self.early_stopping is True:
            return pool, is_full
        best = self.best_possible(state, candidates.value[:, 0], length, settings)
        return pool, is_full & (worst >= best)

    def best_possible(
        self, state: S, sums: Float[Array, " B"], length: Length, settings: DecodeSettings
    ) -> Float[Array, " B"]:
        """The score, length penalty included, that the best beam of each row can reach.

        A sum of log-probabilities only falls, but the length penalty may raise the score.
        `early_stopping=False` assumes the present length, "never" the most favourable one.
        """
        if self.early_stopping == "never":
            max_new_tokens = settings.max_length - state.start_len
            length = jnp.where(self.length_penalty > 0, max_new_tokens, length)
        return length_normalized(sums, length, self.length_penalty)

    def ranked(self, state: S) -> Hypotheses:
        """Finished sequences, and unfinished ones that may be returned, best first."""
        return state.finished

    def best(self, state: S) -> Hypotheses:
        """The sequences that are returned. A sequence counts as ended once its row has ended."""
        best = self.ranked(state).beams(slice(self.num_return_sequences))
        count, reason = state.count[:, None], state.reason[:, None]
        has_ended = (reason == LENGTH) & (best.reason != RUNNING)
        return dataclasses.replace(
            best,
            count=jnp.where(reason == NONFINITE, count, best.count),
            reason=jnp.where(has_ended, best.reason, reason),
        )

    def finish(self, state: S, settings: DecodeSettings) -> Result:
        best = self.best(state)
        indices = best.beam_indices

        def in_batch(indices: Int[Array, "B M T"]) -> Int[Array, "BM T"]:
            """Counts beams over the whole batch, as transformers does."""
            first = jnp.arange(indices.shape[0], dtype=jnp.int32)[:, None, None] * self.num_beams
            counted = jnp.where(indices >= 0, indices + first, -1)
            return counted.reshape(-1, indices.shape[2])

        return Result(
            sequences=best.sequences.reshape(-1, best.sequences.shape[2]),
            length=state.start_len + jnp.max(best.count),
            steps=state.step,
            lengths=best.count.reshape(-1),
            finish_reasons=best.reason.reshape(-1),
            scores=state.scores,
            logits=state.logits,
            sequences_scores=best.scores.reshape(-1),
            beam_indices=in_batch(indices),
            records=state.records,
        )

    def returned_cache(self, state: S) -> ReturnedCache:
        return _returned_cache(self, state)


@jax.jit
def _returned_cache(strategy: BeamStrategy[Any], state: BeamState) -> ReturnedCache:
    best = strategy.best(state)
    lengths = state.start_len + best.count
    written = jnp.arange(state.mask.shape[1])[None, None] < lengths[..., None]
    mask = (state.mask[:, None] & written).reshape(-1, state.mask.shape[1])
    sequences = best.sequences.reshape(mask.shape)
    return ReturnedCache(state.beam_cache.sequence_cache(best.beam_indices), sequences, mask)


def whole_rows(
    out: DecodeOutput,
) -> tuple[Float[Array, "B T V"], Float[Array, "B T V"] | None]:
    """Logits and unconditional logits with the whole vocabulary on each device.

    Candidates are chosen among the tokens of all beams of a row. Otherwise XLA would all-gather
    several arrays of that size.
    """
    return constrain((out.logits, out.unconditional_logits), "rows")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch(BeamStrategy[BeamState]):
    """Beam search; with `sampling`, beam sampling."""

    sampling: bool = dataclasses.field(metadata={"static": True})

    @property
    def draws(self) -> bool:
        return self.sampling

    def initial_state(
        self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int
    ) -> BeamState:
        starts = jnp.arange(self.num_beams) == 0
        return BeamState(**self.initial_fields(inputs, cache, new_token_bucket, starts))

    def ended(self, state: BeamState) -> BeamState:
        """The state if a stopping criterion had met all running beams at their newest token."""
        length = (state.cur_len - state.start_len)[..., None]
        scores = length_normalized(state.running.scores, length, self.length_penalty[..., None])
        scores = scores + jnp.where(state.reason != RUNNING, WORST, 0.0)[:, None]
        reason = jnp.full_like(state.running.reason, STOP)
        new = dataclasses.replace(state.running, scores=scores, reason=reason)
        finished = state.finished.join(new).best(self.num_beams)
        return state.replace(finished=finished, reason=jnp.full_like(state.reason, LENGTH))

    def choose(
        self,
        state: BeamState,
        logits: Float[Array, "BN V"],
        unconditional: Float[Array, "BN V"] | None,
        settings: DecodeSettings,
    ) -> BeamState:
        scores = beam_scores(state, state.running, logits, unconditional, settings)
        state = record_step(state, logits, scores, settings)
        scores = scores.reshape(*state.running.scores.shape, -1)
        total = scores + state.running.scores[..., None]
        candidates = best_candidates(total, state, settings, sampling=self.sampling)
        is_stopped = self.stopped(state, candidates, scores, settings)
        reason = beam_reasons(candidates.token, state, settings, is_stopped)
        candidates = dataclasses.replace(candidates, finishes=reason != RUNNING)

        value, parents, token = candidates.next_beams(self.num_beams)
        running = state.running.extend(parents, token, value, state)
        pool = self.pool_after(state, candidates, reason)
        state = advance(state, running, parents, finished=pool)
        no_candidate_left = (candidates.finishes | candidates.unused).all(axis=1)
        return end_rows(state, no_candidate_left | self.pool_is_final(state, settings), settings)

    def stopped(
        self,
        state: BeamState,
        candidates: Candidates,
        scores: Float[Array, "B N V"],
        settings: DecodeSettings,
    ) -> Bool[Array, "B K"]:
        """Candidates that a stopping criterion finishes."""
        batch, count = candidates.token.shape
        if not settings.stops:
            return jnp.zeros((batch, count), bool)
        sequences = state.running.extend(candidates.beam, candidates.token, candidates.value, state)
        return settings.stops(
            sequences.sequences.reshape(batch * count, -1),
            take_per_row(scores, candidates.beam).reshape(batch * count, -1),
            state.cur_len + 1,
            mask=jnp.repeat(extended_mask(state), count, axis=0) if settings.aligned else None,
        ).reshape(batch, count)

    def pool_after(
        self, state: BeamState, candidates: Candidates, reason: Int[Array, "B K"]
    ) -> Hypotheses:
        """The pool with the candidates that finish now; only the N best candidates may enter.

        Args:
            reason: why each candidate finishes, or `RUNNING`.
        """
        best = (candidates.value, candidates.beam, candidates.token, reason)
        value, beam, token, reason = (x[:, : self.num_beams] for x in best)
        length = (state.cur_len + 1 - state.start_len)[..., None]
        score = length_normalized(value, length, self.length_penalty[..., None])
        row_has_ended = (state.reason != RUNNING)[:, None]
        score = score + jnp.where(row_has_ended, WORST, 0.0)
        score = score + jnp.where(reason != RUNNING, 0.0, WORST)
        new = state.running.extend(beam, token, score, state, reason)
        return state.finished.join(new).best(self.num_beams)

    def pool_is_final(self, state: BeamState, settings: DecodeSettings) -> Bool[Array, " B"]:
        """True for rows that are finished: their pool is full, and no running beam can enter it.
        With `early_stopping=True` every full pool is final."""
        length = state.cur_len - state.start_len
        best = self.best_possible(state, state.running.scores[:, 0], length, settings)
        is_full = (state.finished.reason != RUNNING).all(axis=1)
        worst = jnp.where(is_full, jnp.min(state.finished.scores, axis=1), WORST)
        can_enter = best > worst
        return is_full | ~can_enter if self.early_stopping is True else ~can_enter


@jax.jit
def end_beams(strategy: BeamSearch, state: BeamState) -> BeamState:
    """`BeamSearch.ended`, compiled: for a time limit, which the host checks."""
    return strategy.ended(state)
