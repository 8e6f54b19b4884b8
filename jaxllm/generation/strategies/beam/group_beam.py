"""Diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424), as transformers 4.56 has it.

The groups of a row search one after the other in each step; a group's scores are lowered at the
tokens that earlier groups have just chosen. Each group has a pool and an end of its own. Two things
differ from transformers: a text that ends with the second of several end tokens keeps it (there
the first one is put in its place), and beam indices count all beams of the batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.generation.strategies.beam.beam_state import (
    Beams,
    BeamState,
    candidates,
    note_choice,
    note_step,
)
from jaxllm.generation.strategies.beam.hypotheses import (
    WORST,
    Hypotheses,
    full_pool_is_final,
    penalised,
    take,
)
from jaxllm.generation.strategies.strategy import DecodeSettings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupBeamState(BeamState):
    """Beams and pool are those of all groups, side by side."""

    done: Bool[Array, "B G"]
    """The group has ended; its beams emit pads."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupBeamSearch(Beams[GroupBeamState]):
    """Beam search in groups that avoid each other's tokens."""

    groups: int = dataclasses.field(metadata={"static": True})

    @property
    def size(self) -> int:
        return self.beams // self.groups

    def init(self, model, prompt, read, settings, room):
        state = GroupBeamState(
            **self.first(prompt, read.cache, room, jnp.arange(self.beams) % self.size == 0),
            done=jnp.zeros((prompt.mask.shape[0], self.groups), bool),
        )
        return self.choose_first(state, read, settings, room)

    def choose(self, state, logits, unconditional, settings):
        batch = state.done.shape[0]
        logits, unconditional = jax.tree.map(
            lambda x: x.reshape(batch, self.beams, -1), (logits, unconditional)
        )
        tokens = jnp.zeros((batch, self.beams), jnp.int32)
        chosen = []
        for group in range(self.groups):
            part = self.search(state, group, logits, unconditional, tokens, settings)
            tokens = tokens.at[:, self.places(group)].set(part.tokens)
            chosen.append(part)
        scores = jnp.concatenate([part.scores for part in chosen], axis=1)
        rows = (batch * self.beams, -1)
        state = note_step(
            state, ~state.done.all(axis=1), logits.reshape(rows), scores.reshape(rows), settings
        )
        running, finished = (
            jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *sides)
            for sides in ([p.running for p in chosen], [p.finished for p in chosen])
        )
        parents = jnp.concatenate([part.parents for part in chosen], axis=1)
        done = jnp.stack([part.done for part in chosen], axis=1)
        return note_choice(state, running, parents, finished=finished, done=done)

    def places(self, group: int) -> slice:
        return slice(group * self.size, (group + 1) * self.size)

    def search(
        self,
        state: GroupBeamState,
        group: int,
        logits: Float[Array, "B N V"],
        unconditional: Float[Array, "B N V"] | None,
        tokens: Array,
        settings: DecodeSettings,
    ) -> Part:
        """One step of one group, after those before it have put their choice into `tokens`."""
        batch, places, done = logits.shape[0], self.places(group), state.done[:, group, None]
        running, finished = (
            jax.tree.map(lambda x: x[:, places], side) for side in (state.running, state.finished)
        )
        if unconditional is not None:
            unconditional = unconditional[:, places].reshape(batch * self.size, -1)
        scores = settings.processors(
            running.sequences.reshape(batch * self.size, -1),
            jax.nn.log_softmax(logits[:, places]).reshape(batch * self.size, -1),
            state.cur_len,
            mask=jnp.repeat(state.mask, self.size, axis=0),
            prompt_len=state.start_len,
            unconditional_logits=unconditional,
            current_tokens=tokens.reshape(-1),
            beam_group_idx=group,
        ).reshape(batch, self.size, -1)
        found = candidates(scores + running.scores[..., None], state, settings)

        value, best = jax.lax.top_k(
            found.value + jnp.where(found.ends | found.spare, WORST, 0.0), self.size
        )
        beam, token = take(found.beam, best), take(found.token, best)
        token = jnp.where(done, settings.pad, token)
        at = (state.cur_len, state.step, group * self.size)
        length = state.cur_len + 1 - state.start_len
        first = slice(0, self.size)
        counts = found.ends[:, first] & ~done
        ended = jnp.where(
            counts, penalised(found.value[:, first], length, self.length_penalty), WORST
        )
        new = running.extend(found.beam[:, first], found.token[:, first], ended, *at)
        finished, _ = finished.join(new).best(self.size)
        return Part(
            running=running.extend(beam, token, jnp.where(done, 0.0, value), *at),
            finished=finished,
            parents=beam + group * self.size,
            tokens=token,
            scores=scores,
            done=state.done[:, group]
            | full_pool_is_final(
                finished,
                found.value[:, 0],
                length,
                settings.max_length - state.start_len,
                self.length_penalty,
                self.early_stopping,
            ),
        )

    def open_rows(self, state):
        return ~state.done.all(axis=1)

    def ranked(self, state):
        """The best texts of all groups; the beams of a group that has not ended count as well."""
        length = state.cur_len - state.start_len
        scores = penalised(state.running.scores, length, self.length_penalty)
        done = jnp.repeat(state.done, self.size, axis=1)
        unfinished = dataclasses.replace(state.running, scores=jnp.where(done, WORST, scores))
        pools = []
        for group in range(self.groups):
            both = [
                jax.tree.map(lambda x: x[:, self.places(group)], side)  # noqa: B023
                for side in (state.finished, unfinished)
            ]
            pools.append(both[0].join(both[1]).best(self.size)[0])
        everything = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *pools)
        return everything.best(self.beams)[0]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one group has chosen in a step."""

    running: Hypotheses
    finished: Hypotheses
    parents: Array
    tokens: Array
    scores: Array
    done: Array
