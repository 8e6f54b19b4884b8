"""Diverse beam search (Vijayakumar et al. 2016, arXiv:1610.02424), as in transformers 4.56.

In each step the groups of a row search one after the other; a group's scores are lowered at the
tokens that earlier groups have just chosen. Each group has its own pool and ends on its own. Two
things differ from transformers: a sequence that ends with the second of several end tokens keeps it
(transformers replaces it by the first), and beam indices are numbered over the whole batch.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam_search import BeamStrategy
from jaxllm.generation.strategies.beam_state import (
    WORST,
    BeamState,
    Hypotheses,
    advance,
    beam_reasons,
    beam_scores,
    best_candidates,
    end_rows,
    length_normalized,
)
from jaxllm.generation.strategies.sample import record_step
from jaxllm.generation.strategies.strategy import DecodeSettings, PrefillInputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupBeamState(BeamState):
    """State of diverse beam search, with the beams and pools of all groups concatenated."""

    group_is_finished: Bool[Array, "B G"]
    """True if the group is finished; its beams get pads."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupBeamSearch(BeamStrategy[GroupBeamState]):
    """Diverse beam search: groups of beams that avoid each other's tokens."""

    num_groups: int = dataclasses.field(metadata={"static": True})

    @property
    def group_size(self) -> int:
        return self.num_beams // self.num_groups

    def initial_state(
        self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int
    ) -> GroupBeamState:
        starts = jnp.arange(self.num_beams) % self.group_size == 0
        return GroupBeamState(
            **self.initial_fields(inputs, cache, new_token_bucket, starts),
            group_is_finished=jnp.zeros((inputs.mask.shape[0], self.num_groups), bool),
        )

    def choose(
        self,
        state: GroupBeamState,
        logits: Float[Array, "BN V"],
        unconditional: Float[Array, "BN V"] | None,
        settings: DecodeSettings,
    ) -> GroupBeamState:
        batch = state.reason.shape[0]
        logits, unconditional = jax.tree.map(
            lambda x: x.reshape(batch, self.num_beams, -1), (logits, unconditional)
        )
        tokens = jnp.zeros((batch, self.num_beams), jnp.int32)
        choices = []
        for group in range(self.num_groups):
            scores = self.group_scores(state, group, logits, unconditional, tokens, settings)
            choice = self.choose_in_group(state, group, scores, settings)
            tokens = tokens.at[:, self.group_slice(group)].set(choice.tokens)
            choices.append(choice)
        all_groups = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *choices)
        logits, scores = (
            x.reshape(batch * self.num_beams, -1) for x in (logits, all_groups.scores)
        )
        state = record_step(state, logits, scores, settings)
        state = advance(
            state,
            all_groups.running,
            all_groups.parents,
            finished=all_groups.finished,
            group_is_finished=all_groups.is_finished,
        )
        return end_rows(state, all_groups.is_finished.all(axis=1), settings)

    def group_slice(self, group: int) -> slice:
        return slice(group * self.group_size, (group + 1) * self.group_size)

    def group_scores(
        self,
        state: GroupBeamState,
        group: int,
        logits: Float[Array, "B N V"],
        unconditional: Float[Array, "B N V"] | None,
        tokens: Int[Array, "B N"],
        settings: DecodeSettings,
    ) -> Float[Array, "B M V"]:
        """Processed scores of a group of M beams, lowered at the tokens of earlier groups.

        Args:
            tokens: int32. The tokens that earlier groups have chosen in this step.
        """
        beams = self.group_slice(group)
        logits, unconditional = jax.tree.map(
            lambda x: x[:, beams].reshape(-1, x.shape[2]), (logits, unconditional)
        )
        scores = beam_scores(
            state,
            state.running.beams(beams),
            logits,
            unconditional,
            settings,
            current_tokens=tokens.reshape(-1),
            beam_group_idx=group,
        )
        return scores.reshape(-1, self.group_size, scores.shape[1])

    def choose_in_group(
        self,
        state: GroupBeamState,
        group: int,
        scores: Float[Array, "B M V"],
        settings: DecodeSettings,
    ) -> GroupChoice:
        """The group's next beams and its pool after this step."""
        beams = self.group_slice(group)
        running, finished = state.running.beams(beams), state.finished.beams(beams)
        is_finished = state.group_is_finished[:, group, None]
        candidates = best_candidates(scores + running.scores[..., None], state, settings)
        enters = candidates.finishes[:, : self.group_size] & ~is_finished
        finished, final = self.extend_pool(
            state, running, finished, candidates, enters, settings, offset=beams.start
        )
        value, beam, token = candidates.next_beams(self.group_size)
        value = jnp.where(is_finished, 0.0, value)
        token = jnp.where(is_finished, settings.pad, token)
        reason = beam_reasons(token, state, settings)
        return GroupChoice(
            running=running.extend(beam, token, value, state, reason, beams.start),
            finished=finished,
            parents=beam + beams.start,
            tokens=token,
            scores=scores,
            is_finished=is_finished | final[:, None],
        )

    def ranked(self, state: GroupBeamState) -> Hypotheses:
        """Sequences of all groups, best first, with the beams of unfinished groups."""
        length = state.cur_len - state.start_len
        scores = length_normalized(state.running.scores, length, self.length_penalty)
        is_finished = jnp.repeat(state.group_is_finished, self.group_size, axis=1)
        unfinished = dataclasses.replace(
            state.running, scores=jnp.where(is_finished, WORST, scores)
        )
        pools = []
        for beams in map(self.group_slice, range(self.num_groups)):
            pool = state.finished.beams(beams).join(unfinished.beams(beams))
            pools.append(pool.best(self.group_size))
        everything = pools[0].join(*pools[1:])
        return everything.best(self.num_beams)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupChoice:
    """Outcome of a step for one group of M beams."""

    running: Hypotheses
    """The group's next beams."""
    finished: Hypotheses
    """The group's pool."""
    parents: Int[Array, "B M"]
    """The beam of the row that each next beam continues."""
    tokens: Int[Array, "B M"]
    """The token that each next beam got."""
    scores: Float[Array, "B M V"]
    """Processed scores of the beams before the step."""
    is_finished: Bool[Array, "B 1"]
    """True if the group is finished."""
