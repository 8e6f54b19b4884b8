"""Sequences that beams build, a pool of finished ones, and their scores."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.generation.strategies.strategy import Prompt
from jaxllm.parallel.sharding import context_mesh, partition

Count = Int[Array, ""] | Int[Array, " B"]
"""A number for all rows, or one for each."""
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
        cur_len: Count,
        step: Count,
        offset: int = 0,
    ) -> Hypotheses:
        """M continuations: each a beam and the token that it gets in column `cur_len`.

        `offset` is the number of the first of these beams, where they are some of a row's.
        """
        return Hypotheses(
            sequences=put_column(take(self.sequences, beam), token, cur_len),
            origin=put_column(take(self.origin, beam), beam + offset, step),
            scores=scores,
        )

    def join(self, other: Hypotheses) -> Hypotheses:
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, other)

    def best(self, count: int) -> tuple[Hypotheses, Int[Array, "B count"]]:
        """The `count` of the highest scores, in order, and their places."""
        _, which = largest(self.scores, count)
        return self.take(which), which

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


def largest(
    scores: Float[Array, "B M"], count: int
) -> tuple[Float[Array, "B count"], Int[Array, "B count"]]:
    """The `count` highest scores of each row, in order, and their places.

    On a mesh every device looks at its own rows: left to itself, XLA would bring all rows together.
    """

    def own(scores: Float[Array, "b M"]):
        value, place = jax.lax.top_k(scores, count)
        return value, place

    mesh = context_mesh()
    if mesh is not None:
        split = partition(scores.shape, ("rows",), mesh)
        return jax.shard_map(own, in_specs=split, out_specs=(split, split))(scores)
    # XLA sorts the whole row where a later slice merges with that inside top_k. But its partitioner
    # splits top_k in two, and the barrier between ends the process.
    return jax.lax.optimization_barrier(own(scores))


def put_column(x: Int[Array, "B M L"], value: Int[Array, "B M"], at: Count) -> Int[Array, "B M L"]:
    """Writes one column of every text of a row."""
    if at.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(x, value[..., None], at, axis=2)
    put = jax.vmap(lambda x, new, at: jax.lax.dynamic_update_slice_in_dim(x, new, at, axis=1))
    return put(x, value[..., None], at)


def column(x: Int[Array, "B M L"], at: Count) -> Int[Array, "B M"]:
    """One column of every text of a row."""
    if at.ndim == 0:
        return jax.lax.dynamic_index_in_dim(x, at, 2, keepdims=False)
    return jnp.take_along_axis(x, at[:, None, None], axis=2)[..., 0]


def penalised(
    scores: Float[Array, " *any"],
    new_tokens: Int[Array, "*#any"],
    length_penalty: Float[Array, "*#any"],
) -> Float[Array, " *any"]:
    """Sums of log-probabilities divided by the number of new tokens to a power."""
    return scores / new_tokens.astype(jnp.float32) ** length_penalty


def full_pool_is_final(
    pool: Hypotheses,
    best: Float[Array, " B"],
    length: Int[Array, ""],
    longest: Int[Array, ""],
    length_penalty: Float[Array, ""],
    early_stopping: bool | str,
) -> Bool[Array, " B"]:
    """Whether a full pool can no longer be improved, as transformers' BeamHypotheses decides it.

    Args:
        best: the sum of log-probabilities of the best candidate of this step.
        length: new tokens that it has.
        longest: most new tokens.
    """
    worst = pool.scores[:, -1]
    full = worst > WORST
    if early_stopping is True:
        return full
    if early_stopping == "never":
        length = jnp.where(length_penalty > 0, longest, length)
    return full & (worst >= penalised(best, length, length_penalty))


def result_length(origin: Int[Array, "B N T"], start_len: Int[Array, ""]) -> Int[Array, ""]:
    """Columns of the longest text."""
    return start_len + jnp.max(jnp.sum(origin >= 0, axis=-1))


def global_indices(origin: Int[Array, "B M T"], beams: int) -> Int[Array, "BM T"]:
    """`beam_indices` as transformers counts them: over the rows of the whole batch."""
    offset = jnp.arange(origin.shape[0], dtype=jnp.int32)[:, None, None] * beams
    return jnp.where(origin >= 0, origin + offset, -1).reshape(-1, origin.shape[2])
