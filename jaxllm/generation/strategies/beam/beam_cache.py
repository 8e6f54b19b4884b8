"""KV cache of beams: the prompt once, then one slot for each beam and step.

The beams of a row are decoded as columns of one row, not as rows of a batch. A beam attends to the
prompt and to its own ancestors. Selecting beams therefore gathers one row of booleans per beam:
keys and values are never copied, and those of the encoder are shared by all beams of a row. The
cost is that a beam computes attention scores for the generated slots of all beams. With beams as
batch rows as many slots would be read, and the prompt once per beam.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam.hypotheses import take_per_row
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamCache:
    """KV cache with the prompt once and one slot per beam and step; immutable, like `Cache`."""

    cache: Cache
    seen: Bool[Array, "B N S"]
    """True at the slots that each beam attends to: the prompt and its ancestors."""
    prompt_slots: Int[Array, ""] | Int[Array, " B"]
    """Number of slots of the prompt."""
    prompt_len: Int[Array, ""] | Int[Array, " B"]
    """Columns of the prompt: `prompt_slots`, or fewer in rows of a continued conversation."""

    @staticmethod
    def init(cache: Cache, batch: int, beams: int) -> BeamCache:
        """Cache of beams after the prompt in `cache` (2 * batch rows with guidance)."""
        aligned = cache.align_lengths()
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
        self, model: Decoder, tokens: Int[Array, "B N"], **options: Any
    ) -> tuple[DecodeOutput, BeamCache]:
        """Runs the model on the newest token of every beam, each in a slot of its own."""
        is_own_slot = jnp.arange(self.cache.capacity) == (
            self.cache.length[..., None, None] + jnp.arange(tokens.shape[1])[:, None]
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
            (after[..., jnp.clip(step, 0, new_token_bucket - 1)] == beam)
            & (step >= 0)
            & (step < new_token_bucket)
        )
        cache = self.cache.first_rows(batch)  # later rows are unconditional contexts
        in_prompt = (cache.mask & (slots < self.prompt_slots))[:, None]
        mask = (in_prompt | is_own_slot).reshape(batch * count, -1)
        cache = cache.repeat(count)
        token_counts = jnp.sum(mask, axis=1, dtype=jnp.int32)
        width = self.cache.capacity - (beams - 1) * new_token_bucket
        return cache.replace(mask=mask, next_position=token_counts).compact(width)
