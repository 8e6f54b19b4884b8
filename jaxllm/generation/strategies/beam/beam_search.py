"""Beam search and beam sampling, as transformers 4.50 and later define them (`_beam_search`).

Each step takes the K best continuations of all N beams of a row. Those that end enter the pool of
finished sequences if they are among the best N; the best N of the others are the next beams.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam.beam_state import (
    BeamState,
    Candidates,
    advance,
    beam_scores,
    best_candidates,
    extended_mask,
)
from jaxllm.generation.strategies.beam.beam_strategy import BeamStrategy
from jaxllm.generation.strategies.beam.hypotheses import (
    WORST,
    Hypotheses,
    length_normalized,
    take_per_row,
)
from jaxllm.generation.strategies.sample import record_step
from jaxllm.generation.strategies.strategy import DecodeSettings, PrefillInputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchState(BeamState):
    """State of beam search."""

    is_sent_finished: Bool[Array, "B N"]
    """Entries of the pool that hold a finished sequence."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch(BeamStrategy[BeamSearchState]):
    """Beam search; with `sampling`, beam sampling."""

    sampling: bool = dataclasses.field(metadata={"static": True})

    def initial_state(
        self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int
    ) -> BeamSearchState:
        batch = inputs.mask.shape[0]
        return BeamSearchState(
            **self.initial_fields(inputs, cache, new_token_bucket, jnp.arange(self.num_beams) == 0),
            is_sent_finished=jnp.zeros((batch, self.num_beams), bool),
        )

    def choose(
        self,
        state: BeamSearchState,
        logits: Float[Array, "BN V"],
        unconditional: Float[Array, "BN V"] | None,
        settings: DecodeSettings,
    ) -> BeamSearchState:
        scores = beam_scores(state, state.running, logits, unconditional, settings)
        state = record_step(state, ~state.is_finished, logits, scores, settings)
        scores = scores.reshape(*state.running.scores.shape, -1)
        total = scores + state.running.scores[..., None]
        candidates = best_candidates(total, state, settings, sampling=self.sampling)
        full = (state.cur_len + 1 >= settings.max_length)[..., None]
        finishes = candidates.finishes | full | self.stopped(state, candidates, scores, settings)
        candidates = dataclasses.replace(candidates, finishes=finishes)

        value, parents, token = candidates.next_beams(self.num_beams)
        running = state.running.extend(parents, token, value, state.cur_len, state.step)
        finished, is_sent_finished = self.pool_after(state, candidates)
        state = advance(
            state, running, parents, finished=finished, is_sent_finished=is_sent_finished
        )
        no_candidate_left = (candidates.finishes | candidates.unused).all(axis=1)
        return state.replace(
            is_finished=state.is_finished | no_candidate_left | self.pool_is_final(state, settings)
        )

    def stopped(
        self,
        state: BeamSearchState,
        candidates: Candidates,
        scores: Float[Array, "B N V"],
        settings: DecodeSettings,
    ) -> Bool[Array, "B K"] | bool:
        """Candidates that a stopping criterion finishes."""
        if not settings.stops:
            return False
        batch, count = candidates.token.shape
        sequences = state.running.extend(
            candidates.beam, candidates.token, candidates.value, state.cur_len, state.step
        )
        return settings.stops(
            sequences.sequences.reshape(batch * count, -1),
            take_per_row(scores, candidates.beam).reshape(batch * count, -1),
            state.cur_len + 1,
            mask=jnp.repeat(extended_mask(state), count, axis=0),
        ).reshape(batch, count)

    def pool_after(
        self, state: BeamSearchState, candidates: Candidates
    ) -> tuple[Hypotheses, Bool[Array, "B N"]]:
        """The pool with the candidates that finish now; only the N best candidates may enter.

        Returns:
            The pool, and which of its entries hold a finished sequence.
        """
        value, beam, token, finishes = (
            x[:, : self.num_beams]
            for x in (candidates.value, candidates.beam, candidates.token, candidates.finishes)
        )
        length = (state.cur_len + 1 - state.start_len)[..., None]
        score = length_normalized(value, length, self.length_penalty[..., None])
        row_is_finished = state.is_finished[:, None]
        score = score + jnp.where(row_is_finished, WORST, 0.0) + jnp.where(finishes, 0.0, WORST)
        new = state.running.extend(beam, token, score, state.cur_len, state.step)
        finished, index = state.finished.join(new).best(self.num_beams)
        return finished, take_per_row(
            jnp.concatenate([state.is_sent_finished, finishes], axis=1), index
        )

    def pool_is_final(self, state: BeamSearchState, settings: DecodeSettings) -> Bool[Array, " B"]:
        """True for rows that are finished: their pool is full, and no running beam can enter it.

        A sum of log-probabilities only falls, but the length penalty may raise the score.
        `early_stopping=False` assumes the present length, "never" the most favourable one; with
        True every full pool is final.
        """
        length = state.cur_len - state.start_len
        if self.early_stopping == "never":
            max_new_tokens = settings.max_length - state.start_len
            length = jnp.where(self.length_penalty > 0, max_new_tokens, length)
        best = length_normalized(state.running.scores[:, 0], length, self.length_penalty)
        is_full = state.is_sent_finished.all(axis=1)
        worst = jnp.where(is_full, jnp.min(state.finished.scores, axis=1), WORST)
        can_enter = best > worst
        return is_full | ~can_enter if self.early_stopping is True else ~can_enter
