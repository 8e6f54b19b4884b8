"""Beam search and beam sampling, as transformers 4.50 and later define them.

Each step looks at the K best continuations of all beams of a row. Those that end go into a pool of
finished texts if they are among the first N; the best N of the others run on.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam.beam_state import (
    Beams,
    BeamState,
    Candidates,
    candidates,
    grown,
    note_choice,
    note_step,
)
from jaxllm.generation.strategies.beam.hypotheses import WORST, largest, penalised, take
from jaxllm.generation.strategies.strategy import DecodeSettings, Prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearchState(BeamState):
    is_finished: Bool[Array, "B N"]
    """Which places of the pool are taken."""
    hopeful: Bool[Array, " B"]
    """The running beams may still improve the pool. Once false it stays so."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch(Beams[BeamSearchState]):
    """The N most likely texts (`sampling`: N likely ones); the first `returns` are returned."""

    sampling: bool = dataclasses.field(metadata={"static": True})

    def init(self, model, prompt, read, settings, room):
        return self.choose_first(self.before(prompt, read.cache, room), read, settings, room)

    def before(self, prompt: Prompt, cache: Cache, room: int) -> BeamSearchState:
        """The state before the first choice, with a cache that holds the prompt."""
        batch = prompt.mask.shape[0]
        return BeamSearchState(
            **self.first(prompt, cache, room, jnp.arange(self.beams) == 0),
            is_finished=jnp.zeros((batch, self.beams), bool),
            hopeful=jnp.ones((batch,), bool),
        )

    def choose(self, state, logits, unconditional, settings):
        batch, beams = state.is_finished.shape
        scores = settings.processors(
            state.running.sequences.reshape(batch * beams, -1),
            jax.nn.log_softmax(logits),
            state.cur_len,
            mask=jnp.repeat(state.mask, beams, axis=0),
            prompt_len=state.start_len,
            unconditional_logits=unconditional,
        )
        state = note_step(state, state.hopeful, logits, scores, settings)
        total = scores.reshape(batch, beams, -1) + state.running.scores[..., None]
        found = candidates(total, state, settings, sampling=self.sampling)
        full = (state.cur_len + 1 >= settings.max_length)[..., None]
        stopped = self.stopped(state, found, scores, settings)
        found = dataclasses.replace(found, ends=found.ends | full | stopped)

        open_scores = found.value + jnp.where(found.ends | found.spare, WORST, 0.0)
        open_scores, best = largest(open_scores, beams)
        parents = take(found.beam, best)
        running = state.running.extend(
            parents, take(found.token, best), open_scores, state.cur_len, state.step
        )
        finished, is_finished = self.pool(state, found)
        state = note_choice(state, running, parents, finished=finished, is_finished=is_finished)
        stuck = (found.ends | found.spare).all(axis=1)
        return state.replace(hopeful=state.hopeful & self.can_improve(state, settings) & ~stuck)

    def stopped(
        self,
        state: BeamSearchState,
        found: Candidates,
        scores: Float[Array, "BN V"],
        settings: DecodeSettings,
    ) -> Bool[Array, "B K"] | bool:
        """Which candidates the stopping criteria end; each is a text of its own."""
        if not settings.stops:
            return False
        batch, count = found.token.shape
        texts = state.running.extend(
            found.beam, found.token, found.value, state.cur_len, state.step
        )
        rows = jnp.arange(batch)[:, None] * self.beams + found.beam
        return settings.stops(
            texts.sequences.reshape(batch * count, -1),
            scores[rows.reshape(-1)],
            state.cur_len + 1,
            mask=jnp.repeat(grown(state), count, axis=0),
        ).reshape(batch, count)

    def pool(self, state: BeamSearchState, found: Candidates):
        """The pool after the texts that ended now; only the N best candidates may enter."""
        value, beam, token, ended = (
            x[:, : self.beams] for x in (found.value, found.beam, found.token, found.ends)
        )
        length = (state.cur_len + 1 - state.start_len)[..., None]
        score = penalised(value, length, self.length_penalty[..., None])
        shut = ~self.open_rows(state)[:, None]
        score = score + jnp.where(shut, WORST, 0.0) + jnp.where(ended, 0.0, WORST)
        new = state.running.extend(beam, token, score, state.cur_len, state.step)
        finished, which = state.finished.join(new).best(self.beams)
        return finished, take(jnp.concatenate([state.is_finished, ended], axis=1), which)

    def can_improve(self, state: BeamSearchState, settings: DecodeSettings) -> Bool[Array, " B"]:
        """Whether the best running beam could still beat the worst of a full pool.

        A running sum only falls, but the length penalty may lift it. `early_stopping` False looks
        at the present length; "never" at the most favourable one.
        """
        length = state.cur_len - state.start_len
        if self.early_stopping == "never":
            most = settings.max_length - state.start_len
            length = jnp.where(self.length_penalty > 0, most, length)
        best = penalised(state.running.scores[:, 0], length, self.length_penalty)
        worst = jnp.min(state.finished.scores, axis=1)
        return best > jnp.where(state.is_finished.all(axis=1), worst, WORST)

    def open_rows(self, state):
        if self.early_stopping is True:
            return state.hopeful & ~state.is_finished.all(axis=1)
        return state.hopeful
