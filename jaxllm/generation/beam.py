"""Beam search and beam sampling, as transformers 4.50 and later define them.

Each step looks at the K best continuations of all beams of a row. Those that end go into a pool of
finished texts if they are among the first N; the best N of the others run on.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.cache import Cache
from jaxllm.generation.beams import (
    WORST,
    Hypotheses,
    Tree,
    global_indices,
    newest,
    penalised,
    result_length,
    take,
)
from jaxllm.generation.sample import record, with_records
from jaxllm.generation.sampling import draw_without_replacement
from jaxllm.generation.strategy import NEVER, Result, Settings, Strategy, note_broken


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamState:
    running: Hypotheses
    """Scores are sums of log-probabilities."""
    finished: Hypotheses
    """The best finished texts, in order; scores with the length penalty."""
    is_finished: Bool[Array, "B N"]
    """Which places of the pool are taken."""
    hopeful: Bool[Array, " B"]
    """The running beams may still improve the pool. Once false it stays so."""
    mask: Bool[Array, "B L"]
    """Which columns of the sequences hold real tokens."""
    start_len: Int[Array, ""]
    cur_len: Int[Array, ""]
    step: Int[Array, ""]
    keys: Key[Array, " B"]
    broken_at: Int[Array, " B"]
    tree: Tree
    scores: Float[Array, "T BN V"] | None = None
    logits: Float[Array, "T BN V"] | None = None

    @property
    def cache(self) -> Cache:
        return self.tree.cache

    def replace(self, **changes) -> BeamState:
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamSearch(Strategy[BeamState]):
    """The N most likely texts (`sampling`: N likely ones); the first `returns` are returned."""

    length_penalty: Float[Array, ""]
    beams: int = dataclasses.field(metadata={"static": True})
    returns: int = dataclasses.field(metadata={"static": True})
    early_stopping: bool | str = dataclasses.field(metadata={"static": True})
    sampling: bool = dataclasses.field(metadata={"static": True})

    streams: ClassVar[bool] = False

    def slots(self, new):
        return self.beams * new

    def init(self, model, prompt, read, settings, room):
        batch, beams = prompt.mask.shape[0], self.beams
        # All beams are the same text so far; only the first counts.
        running = Hypotheses.start(
            prompt, beams, room, jnp.where(jnp.arange(beams) == 0, 0.0, WORST)
        )
        state = BeamState(
            running=running,
            finished=Hypotheses.start(prompt, beams, room, jnp.full((beams,), WORST)),
            is_finished=jnp.zeros((batch, beams), bool),
            hopeful=jnp.ones((batch,), bool),
            mask=jnp.asarray(prompt.mask),
            start_len=jnp.asarray(prompt.start_len),
            cur_len=jnp.asarray(prompt.start_len),
            step=jnp.zeros((), jnp.int32),
            keys=prompt.keys,
            broken_at=jnp.full((batch,), NEVER, jnp.int32),
            tree=Tree.start(read.cache, beams),
        )
        logits = jnp.repeat(read.logits[:, 0], beams, axis=0)
        return self.choose(with_records(state, logits, settings, room), logits, settings)

    def step(self, model, state, settings):
        read, tree = state.tree.read(model, newest(state.running.sequences, state.cur_len))
        logits = read.logits.reshape(-1, read.logits.shape[-1])
        return self.choose(state.replace(tree=tree), logits, settings)

    def choose(self, state: BeamState, logits: Float[Array, "BN V"], settings: Settings):
        """From the logits of all beams to the next beams and the pool."""
        batch, beams = state.is_finished.shape
        scores = settings.processors(
            state.running.sequences.reshape(batch * beams, -1),
            jax.nn.log_softmax(logits),
            state.cur_len,
            mask=jnp.repeat(state.mask, beams, axis=0),
        )
        state = state.replace(
            scores=record(state.scores, scores, state.step),
            logits=record(state.logits, logits, state.step),
            broken_at=state.broken_at
            if settings.allow_nonfinite
            else note_broken(
                state.broken_at,
                state.step,
                state.hopeful,
                logits.reshape(batch, -1),
                scores.reshape(batch, -1),
            ),
        )
        total = scores.reshape(batch, beams, -1) + state.running.scores[..., None]
        value, beam, token, spare = self.candidates(state, total, settings)
        ends = jnp.isin(token, settings.eos) | (state.cur_len + 1 >= settings.max_length)

        open_scores = value + jnp.where(ends | spare, WORST, 0.0)
        _, best = jax.lax.top_k(open_scores, beams)
        parents = take(beam, best)
        running = state.running.extend(
            parents, take(token, best), take(open_scores, best), state.cur_len, state.step
        )
        finished, is_finished = self.pool(state, value, beam, token, ends)

        cur_len = state.cur_len + 1
        state = state.replace(
            running=running,
            finished=finished,
            is_finished=is_finished,
            tree=state.tree.keep(parents),
            mask=state.mask | (jnp.arange(state.mask.shape[1]) == state.cur_len),
            cur_len=cur_len,
            step=state.step + 1,
        )
        hopeful = state.hopeful & self.can_improve(state, settings) & ~(ends | spare).all(axis=1)
        return state.replace(hopeful=hopeful)

    def candidates(self, state: BeamState, total: Float[Array, "B N V"], settings: Settings):
        """The K best (or K drawn) continuations: score, beam and token, each [B, K].

        K leaves N that do not end, even if every beam ends with every end token. The list is made
        for as many end tokens as the table has places; those beyond K are marked `spare` [K].
        """
        batch, beams, vocab = total.shape
        flat = total.reshape(batch, -1)
        places = max(2, 1 + settings.eos.shape[0]) * beams
        wanted = jnp.maximum(2, 1 + jnp.sum(settings.eos >= 0)) * beams
        places = min(places, beams * vocab)
        if self.sampling:
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.keys, state.step)
            value, index = draw_without_replacement(keys, flat, places, wanted, worst=WORST)
        else:
            value, index = jax.lax.top_k(flat, places)
        return value, index // vocab, index % vocab, jnp.arange(places) >= wanted

    def pool(self, state: BeamState, value, beam, token, ends):
        """The pool after the texts that ended now; only the N best candidates may enter."""
        first = slice(0, self.beams)
        ended = ends[:, first]
        score = penalised(value[:, first], state.cur_len + 1 - state.start_len, self.length_penalty)
        shut = ~state.hopeful
        if self.early_stopping is True:
            shut |= state.is_finished.all(axis=1)
        score = score + jnp.where(shut, WORST, 0.0)[:, None] + jnp.where(ended, 0.0, WORST)
        new = state.running.extend(
            beam[:, first], token[:, first], score, state.cur_len, state.step
        )
        merged = state.finished.join(new)
        taken = jnp.concatenate([state.is_finished, ended], axis=1)
        _, best = jax.lax.top_k(merged.scores, self.beams)
        return merged.take(best), take(taken, best)

    def can_improve(self, state: BeamState, settings: Settings) -> Bool[Array, " B"]:
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
        full = state.is_finished.all(axis=1)
        return best > jnp.where(full, worst, WORST)

    def alive(self, state, until):
        going = state.hopeful
        if self.early_stopping is True:
            going = going & ~state.is_finished.all(axis=1)
        return (state.cur_len < until) & going.any()

    def finish(self, state, settings):
        best = jax.tree.map(lambda x: x[:, : self.returns], state.finished)
        return Result(
            sequences=best.sequences.reshape(-1, best.sequences.shape[2]),
            length=result_length(best.origin, state.start_len),
            steps=state.step,
            broken_at=state.broken_at,
            scores=state.scores,
            logits=state.logits,
            sequences_scores=best.scores.reshape(-1),
            beam_indices=global_indices(best.origin, self.beams),
        )
