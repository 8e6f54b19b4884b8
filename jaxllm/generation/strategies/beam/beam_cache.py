"""The place of beams in the cache.

The beams of a row are columns of one call, not rows of a batch. The cache holds the prompt once and
then, for every step, one slot a beam; a beam sees the prompt and, of the steps, its own ancestors.
Choosing beams therefore gathers a row of booleans for each; keys and values never move, and the
encoder's are shared by all beams of a row.

What that costs: attention over the generated part reads and scores the slots of all beams (a
batch of separate beams would read as much, and besides the prompt once a beam).
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
    """A cache that holds the prompt once and a slot for each beam and step."""

    cache: Cache
    seen: Bool[Array, "B N S"]
    """The slots that each beam sees: the prompt and its ancestors."""
    root: Int[Array, ""] | Int[Array, " B"]
    """Slots of the prompt."""
    prompt_len: Int[Array, ""] | Int[Array, " B"]
    """Columns of the prompt: as many, or fewer in some rows of a continued conversation."""

    @staticmethod
    def start(cache: Cache, batch: int, beams: int) -> BeamCache:
        """Of a cache that holds the prompt; with guidance it has more rows than the batch."""
        aligned = cache.aligned()
        seen = jnp.arange(cache.capacity) < aligned.length[..., None, None]
        seen = jnp.broadcast_to(seen, (batch, beams, cache.capacity))
        return BeamCache(aligned, seen, aligned.length, cache.length)

    @property
    def columns(self) -> Int[Array, " S"] | Int[Array, "B S"]:
        """The column that each slot belongs to."""
        slots, beams = jnp.arange(self.cache.capacity, dtype=jnp.int32), self.seen.shape[1]
        root = self.root[..., None]
        step = jnp.maximum(slots - root, 0) // beams
        return jnp.where(slots < root, slots, self.prompt_len[..., None] + step)

    def read(
        self, model: Any, tokens: Int[Array, "B N"], **options: Any
    ) -> tuple[DecodeOutput, BeamCache]:
        """Runs the newest token of every beam."""
        own = jnp.arange(self.cache.capacity) == (
            self.cache.length[..., None, None] + jnp.arange(tokens.shape[1])[:, None]
        )
        branches = Branches(seen=self.seen | own, columns=self.columns)
        read = model.decode(
            tokens, jnp.ones(tokens.shape, bool), self.cache, branches=branches, **options
        )
        return read, dataclasses.replace(self, cache=read.cache, seen=branches.seen)

    def keep(self, parents: Int[Array, "B N"]) -> BeamCache:
        """Each beam takes the place of one of those just read."""
        return dataclasses.replace(self, seen=take(self.seen, parents))

    def texts(self, origin: Int[Array, "B R T"]) -> Cache:
        """A cache of each text, by the beams that its tokens were chosen from (`Hypotheses`).

        The beam that a token was chosen from is that of the token before it, and so says which
        slot holds that. The last token of a text was not read.
        """
        batch, texts, room = origin.shape
        beams, slots = self.seen.shape[1], jnp.arange(self.cache.capacity)
        step, beam = jnp.divmod(slots - self.root, beams)
        after = jnp.pad(origin[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1)
        own = (after[..., jnp.clip(step, 0, room - 1)] == beam) & (step >= 0) & (step < room)
        cache = self.cache.first(batch)  # unconditional contexts lie below
        prompt = (cache.mask & (slots < self.root))[:, None]
        mask = (prompt | own).reshape(batch * texts, -1)
        cache = cache.repeat(texts)
        known = jnp.sum(mask, axis=1, dtype=jnp.int32)
        width = self.cache.capacity - (beams - 1) * room
        return cache.replace(mask=mask, next_position=known).compact(width)
