"""What the beam strategies share: hypotheses, their place in the cache, and length penalties.

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
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache import Branches, Cache
from jaxllm.generation.strategy import Prompt
from jaxllm.models.outputs import DecodeOutput

WORST = -1e9
"""Stands for minus infinity in scores of beams, as in transformers: sums stay finite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """N texts a row, running or finished."""

    sequences: Int[Array, "B N L"]
    origin: Int[Array, "B N T"]
    """The beam from which each new token was chosen; -1 where there is none."""
    scores: Float[Array, "B N"]

    def take(self, which: Int[Array, "B M"]) -> Hypotheses:
        return jax.tree.map(lambda x: take(x, which), self)

    def extend(
        self,
        beam: Int[Array, "B M"],
        token: Int[Array, "B M"],
        scores: Float[Array, "B M"],
        cur_len: Int[Array, ""],
        step: Int[Array, ""],
    ) -> Hypotheses:
        """M continuations: each a beam and the token that it gets in column `cur_len`."""

        def put(x, value, at):
            return jax.lax.dynamic_update_slice_in_dim(x, value[..., None], at, axis=2)

        return Hypotheses(
            sequences=put(take(self.sequences, beam), token, cur_len),
            origin=put(take(self.origin, beam), beam, step),
            scores=scores,
        )

    def join(self, other: Hypotheses) -> Hypotheses:
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, other)

    @staticmethod
    def start(prompt: Prompt, beams: int, room: int, scores: Float[Array, " N"]) -> Hypotheses:
        """The prompt alone, `beams` times."""
        batch, length = prompt.sequences.shape
        sequences = jnp.asarray(prompt.sequences)[:, None]
        return Hypotheses(
            sequences=jnp.broadcast_to(sequences, (batch, beams, length)),
            origin=jnp.full((batch, beams, room), -1, jnp.int32),
            scores=jnp.broadcast_to(scores, (batch, beams)),
        )


def take(x: Array, which: Int[Array, "B M"]) -> Array:
    """x[b, which[b]] for each row b."""
    return jnp.take_along_axis(x, which.reshape(*which.shape, *(1,) * (x.ndim - 2)), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """A cache that holds the prompt once and a slot for each beam and step."""

    cache: Cache
    seen: Bool[Array, "B N S"]
    """The slots that each beam sees: the prompt and its ancestors."""
    root: Int[Array, ""]
    """Slots of the prompt."""

    @staticmethod
    def start(cache: Cache, beams: int) -> Tree:
        batch, size = cache.mask.shape
        seen = jnp.arange(size) < cache.length
        return Tree(cache, jnp.broadcast_to(seen, (batch, beams, size)), cache.length)

    def read(self, model: Any, tokens: Int[Array, "B N"]) -> tuple[DecodeOutput, Tree]:
        """Runs the newest token of every beam."""
        beams, slots = tokens.shape[1], jnp.arange(self.cache.capacity, dtype=jnp.int32)
        own = slots == self.cache.length + jnp.arange(beams)[:, None]
        step = jnp.maximum(slots - self.root, 0) // beams
        columns = jnp.where(slots < self.root, slots, self.root + step)
        branches = Branches(seen=self.seen | own, columns=columns)
        read = model.decode(tokens, jnp.ones(tokens.shape, bool), self.cache, branches=branches)
        return read, Tree(read.cache, branches.seen, self.root)

    def keep(self, parents: Int[Array, "B N"]) -> Tree:
        """Each beam takes the place of one of those just read."""
        return dataclasses.replace(self, seen=take(self.seen, parents))


def penalised(
    scores: Float[Array, " *any"], new_tokens: Int[Array, ""], length_penalty: Float[Array, ""]
) -> Float[Array, " *any"]:
    """Sums of log-probabilities divided by the number of new tokens to a power."""
    return scores / new_tokens.astype(jnp.float32) ** length_penalty


def newest(sequences: Int[Array, "B N L"], cur_len: Int[Array, ""]) -> Int[Array, "B N"]:
    return jax.lax.dynamic_index_in_dim(sequences, cur_len - 1, axis=2, keepdims=False)


def result_length(origin: Int[Array, "B N T"], start_len: Int[Array, ""]) -> Int[Array, ""]:
    """Columns of the longest text."""
    return start_len + jnp.max(jnp.sum(origin >= 0, axis=-1))


def global_indices(origin: Int[Array, "B M T"], beams: int) -> Int[Array, "BM T"]:
    """`beam_indices` as transformers counts them: over the rows of the whole batch."""
    offset = jnp.arange(origin.shape[0], dtype=jnp.int32)[:, None, None] * beams
    return jnp.where(origin >= 0, origin + offset, -1).reshape(-1, origin.shape[2])
