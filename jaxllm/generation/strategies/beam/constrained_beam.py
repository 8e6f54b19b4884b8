"""Constrained beam search (force_words_ids), as transformers 4.56 has it.

Beside the best continuations, each step considers every token that would bring a beam on in its
constraints. All of them are sorted into banks by how much they have fulfilled, and the next beams
are taken from the banks in turns, so that a text that fulfils more is kept though less likely.

Not copied from transformers: two words of a disjunction in progress that share a list there, so
that the second is judged wrongly; the first end token in place of the one that was found; and the
prompt's padding, which counts as tokens there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.generation.strategies.beam.beam_state import (
    Beams,
    BeamState,
    candidates,
    note_choice,
    note_step,
)
from jaxllm.generation.strategies.beam.constraints import Progress, Tries
from jaxllm.generation.strategies.beam.hypotheses import WORST, full_pool_is_final, penalised, take

BANK = 100.0
"""What a point in the banks is worth beside a log-probability when candidates are sorted."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstrainedState(BeamState):
    progress: Progress
    """Of every running beam, [B, N, ...]."""
    done: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstrainedBeamSearch(Beams[ConstrainedState]):
    """Beam search whose texts contain given phrases."""

    tries: Tries

    def init(self, model, prompt, read, settings, room):
        state = ConstrainedState(
            **self.first(prompt, read.cache, room, jnp.arange(self.beams) == 0),
            progress=self.of_prompt(prompt),
            done=jnp.zeros((prompt.mask.shape[0],), bool),
        )
        return self.choose_first(state, read, settings, room)

    def of_prompt(self, prompt) -> Progress:
        """Progress that the prompt has made: a phrase in it counts as fulfilled."""
        batch = prompt.sequences.shape[0]

        def add(progress, column):
            token, real = column
            new = progress.add(self.tries, token)
            keep = jax.tree.map(lambda x: real.reshape(-1, *(1,) * (x.ndim - 1)), new)
            return jax.tree.map(jnp.where, keep, new, progress), None

        columns = jnp.asarray(prompt.sequences).T, jnp.asarray(prompt.mask).T
        progress, _ = jax.lax.scan(add, Progress.start(self.tries, batch), columns)
        return jax.tree.map(lambda x: jnp.repeat(x[:, None], self.beams, axis=1), progress)

    def choose(self, state, logits, unconditional, settings):
        batch, beams = state.done.shape[0], self.beams
        scores = settings.processors(
            state.running.sequences.reshape(batch * beams, -1),
            jax.nn.log_softmax(logits),
            state.cur_len,
            mask=jnp.repeat(state.mask, beams, axis=0),
            prompt_len=state.start_len,
            unconditional_logits=unconditional,
        )
        total = scores.reshape(batch, beams, -1) + state.running.scores[..., None]
        state = note_step(state, ~state.done, logits, total.reshape(batch * beams, -1), settings)
        found = candidates(total, state, settings)

        length = state.cur_len + 1 - state.start_len
        value, beam, token, ended = (
            x[:, :beams] for x in (found.value, found.beam, found.token, found.ends)
        )
        ended = ended & take(state.progress.complete, beam) & ~state.done[:, None]
        score = jnp.where(ended, penalised(value, length, self.length_penalty), WORST)
        new = state.running.extend(beam, token, score, state.cur_len, state.step)
        finished, _ = state.finished.join(new).best(beams)
        done = state.done | full_pool_is_final(
            finished,
            found.value[:, 0],
            length,
            settings.max_length - state.start_len,
            self.length_penalty,
            self.early_stopping,
        )

        value, best = jax.lax.top_k(
            found.value + jnp.where(found.ends | found.spare, WORST, 0.0), beams
        )
        value, beam, token, progress = self.in_banks(
            state, total, value, take(found.beam, best), take(found.token, best)
        )
        running = state.running.extend(beam, token, value, state.cur_len, state.step)
        return note_choice(state, running, beam, finished=finished, progress=progress, done=done)

    def in_banks(
        self,
        state: ConstrainedState,
        total: Float[Array, "B N V"],
        value: Float[Array, "B N"],
        beam: Int[Array, "B N"],
        token: Int[Array, "B N"],
    ):
        """The next beams: the best continuations, joined by those that fulfil constraints."""
        (batch, beams, vocab), tries = total.shape, self.tries
        plain = jax.tree.map(lambda x: take(x, beam), state.progress).add(tries, token)

        # One candidate for each edge of the tries that is open to a beam ...
        edges = tries.token.shape[0]
        edge = jnp.broadcast_to(jnp.arange(edges), (batch, beams, edges))
        forced = jnp.broadcast_to(tries.token, edge.shape)
        open_ = state.progress.edges(tries) & ~state.progress.complete[..., None]
        # ... but a text only once: not what two constraints or two equal beams propose, nor what
        # is among the best continuations anyway.
        rank = state.progress.queue(tries) * edges + edge
        never = jnp.iinfo(jnp.int32).max
        rows = jnp.arange(batch)[:, None, None], jnp.arange(beams)[:, None]
        first = jnp.full((batch, beams, vocab), never, jnp.int32)
        first = first.at[*rows, forced].min(jnp.where(open_, rank, never))
        open_ &= first[*rows, forced] == rank
        texts = state.running.sequences
        same = (texts[:, :, None] == texts[:, None]).all(axis=-1)
        open_ &= (jnp.argmax(same, axis=-1) == jnp.arange(beams))[..., None]
        known = take(same.swapaxes(1, 2), beam).swapaxes(1, 2)[..., None, :]
        open_ &= ~(known & (forced[..., None] == token[:, None, None, :])).any(axis=-1)

        spread = jax.tree.map(
            lambda x: jnp.broadcast_to(x[:, :, None], (*x.shape[:2], edges, *x.shape[2:])).reshape(
                batch, beams * edges, *x.shape[2:]
            ),
            state.progress,
        )
        flat = (batch, beams * edges)
        pushed = spread.take_edge(tries, edge.reshape(flat))
        parent = jnp.broadcast_to(jnp.arange(beams)[:, None], (beams, edges)).reshape(-1)
        everything = jax.tree.map(
            lambda a, b: jnp.concatenate([a, b], axis=1),
            (value, beam, token, plain),
            (
                jnp.take_along_axis(total, jnp.maximum(forced, 0), axis=2).reshape(flat),
                jnp.broadcast_to(parent, flat),
                forced.reshape(flat),
                pushed,
            ),
        )
        valid = jnp.concatenate([jnp.ones((batch, beams), bool), open_.reshape(flat)], axis=1)
        order = in_turns(everything[3].bank(tries), everything[0], valid)[:, :beams]
        # Without a candidate of the constraints the best continuations stay in their own order.
        plain_order = jnp.broadcast_to(jnp.arange(beams), order.shape)
        order = jnp.where(open_.any(axis=(1, 2))[:, None], order, plain_order)
        return jax.tree.map(lambda x: take(x, order), everything)

    def ranked(self, state):
        """Running texts count if they fulfil all constraints; the others only if too few do."""
        complete = state.progress.complete
        few = jnp.sum(complete, axis=1, keepdims=True) < self.returns
        counts = (complete | few) & ~state.done[:, None]
        length = state.cur_len - state.start_len
        scores = penalised(state.running.scores, length, self.length_penalty)
        unfinished = dataclasses.replace(state.running, scores=jnp.where(counts, scores, WORST))
        return state.finished.join(unfinished).best(self.beams)[0]


def in_turns(
    bank: Int[Array, "B M"], score: Float[Array, "B M"], valid: Bool[Array, "B M"]
) -> Int[Array, "B M"]:
    """Candidates by bank and score, the best of each bank first, then the second best, and so on.

    >>> import jax.numpy as jnp
    >>> bank = jnp.array([[0, 0, 1, 1]])
    >>> in_turns(bank, jnp.array([[-1.0, -2.0, -5.0, -4.0]]), bank >= 0).tolist()
    [[3, 0, 2, 1]]
    """
    key = jnp.where(valid, bank * BANK + score, -jnp.inf)
    order = jnp.argsort(key, axis=1, descending=True, stable=True)
    banks, places = take(bank, order), jnp.arange(bank.shape[1])
    starts = jnp.concatenate([jnp.ones_like(banks[:, :1], bool), banks[:, 1:] != banks[:, :-1]], 1)
    run = jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
    turn = jnp.where(take(valid, order), places - run, bank.shape[1])
    return take(order, jnp.argsort(turn, axis=1, stable=True))
