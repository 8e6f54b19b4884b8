"""The KV cache of beams: the prompt once, and then a slot for each beam and step.

The beams of a row are decoded as columns of one row, not as rows of a batch. A beam attends to the
prompt and to its own ancestors. Choosing beams therefore gathers one row of booleans a beam: keys
and values are never copied, and those of the encoder are shared by all beams of a row. In return,
attention over the generated columns computes scores for the slots of all beams; a batch of separate
beams would read as many slots, and the prompt once a beam besides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam.hypotheses import take
from jaxllm.models.outputs import DecodeOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamCache:
    """A cache with the prompt once and a slot for each beam and step; a value, like `Cache`."""

    cache: Cache
    seen: Bool[Array, "B N S"]
    """The slots that each beam attends to: the prompt and its ancestors."""
    prompt_slots: Int[Array, ""] | Int[Array, " B"]
    """Slots of the prompt."""
    prompt_len: Int[Array, ""] | Int[Array, " B"]
    """Columns of the prompt: as many as `prompt_slots`, or in rows of a continued conversation
    fewer."""

    @staticmethod
    def init(cache: Cache, batch: int, beams: int) -> BeamCache:
        """Beams at the end of a prompt, which `cache` holds (with guidance in 2 * batch rows)."""
        aligned = cache.aligned()
        seen = jnp.arange(cache.capacity) < aligned.length[..., None, None]
        seen = jnp.broadcast_to(seen, (batch, beams, cache.capacity))
        return BeamCache(aligned, seen, aligned.length, cache.length)

    @property
    def columns(self) -> Int[Array, " S"] | Int[Array, "B S"]:
        """The column that each slot belongs to."""
        slots, beams = jnp.arange(self.cache.capacity, dtype=jnp.int32), self.seen.shape[1]
        prompt = self.prompt_slots[..., None]
        step = jnp.maximum(slots - prompt, 0) // beams
        return jnp.where(slots < prompt, slots, self.prompt_len[..., None] + step)

    def decode(
        self, model: Any, tokens: Int[Array, "B N"], **options: Any
    ) -> tuple[DecodeOutput, BeamCache]:
        """Runs the newest token of every beam through the model, in slots of their own."""
        own = jnp.arange(self.cache.capacity) == (
            self.cache.length[..., None, None] + jnp.arange(tokens.shape[1])[:, None]
        )
        branches = Branches(seen=self.seen | own, columns=self.columns)
        out = model.decode(
            tokens, jnp.ones(tokens.shape, bool), self.cache, branches=branches, **options
        )
        return out, dataclasses.replace(self, cache=out.cache, seen=branches.seen)

    def select(self, parents: Int[Array, "B N"]) -> BeamCache:
        """The next beams: beam n continues parents[:, n]."""
        return dataclasses.replace(self, seen=take(self.seen, parents))

    def sequence_cache(self, beam_indices: Int[Array, "B R T"]) -> Cache:
        """A plain cache with a row for each of R sequences a row, without the other beams.

        The beam that a token was chosen from (`Hypotheses.beam_indices`) is the beam of the token
        before it, and so tells its slot. The last token of a sequence is not in the cache.
        """
        batch, count, new_token_bucket = beam_indices.shape
        beams, slots = self.seen.shape[1], jnp.arange(self.cache.capacity)
        step, beam = jnp.divmod(slots - self.prompt_slots, beams)
        after = jnp.pad(beam_indices[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
        own = (
            (after[..., jnp.clip(step, 0, new_token_bucket - 1)] == beam)
            & (step >= 0)
            & (step < new_token_bucket)
        )
        cache = self.cache.first(batch)  # the rows after it are unconditional contexts
        in_prompt = (cache.mask & (slots < self.prompt_slots))[:, None]
        mask = (in_prompt | own).reshape(batch * count, -1)
        cache = cache.repeat(count)
        known = jnp.sum(mask, axis=1, dtype=jnp.int32)
        width = self.cache.capacity - (beams - 1) * new_token_bucket
        return cache.replace(mask=mask, next_position=known).compact(width)
