"""Sequences of beams, running or in the pool of finished ones, and their scores."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.generation.strategies.strategy import PrefillInputs
from jaxllm.parallel.sharding import context_mesh, partition_spec

Count = Int[Array, ""] | Int[Array, " B"]
"""int32. One number for all rows, or one per row."""
WORST = -1e9
"""Score in place of minus infinity, as in transformers: sums stay finite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """N sequences per row, running or finished."""

    sequences: Int[Array, "B N L"]
    """int32. Prompt and new tokens."""
    beam_indices: Int[Array, "B N T"]
    """int32. The beam from which each new token was chosen; -1 after the end."""
    scores: Float[Array, "B N"]
    """float32. Sums of log-probabilities; in the pool with the length penalty applied."""

    def take(self, index: Int[Array, "B M"]) -> Hypotheses:
        return jax.tree.map(lambda x: take_per_row(x, index), self)

    def beams(self, beams: slice) -> Hypotheses:
        """The sequences of adjacent beams, such as those of a group."""
        return jax.tree.map(lambda x: x[:, beams], self)

    def extend(
        self,
        beam: Int[Array, "B M"],
        token: Int[Array, "B M"],
        scores: Float[Array, "B M"],
        cur_len: Count,
        step: Count,
        offset: int = 0,
    ) -> Hypotheses:
        """M continuations, each of one beam with one token in column `cur_len`.

        Args:
            step: new tokens before this one.
            offset: index of the first of these beams among all beams of a row (groups).
        """
        return Hypotheses(
            sequences=write_column(take_per_row(self.sequences, beam), token, cur_len),
            beam_indices=write_column(take_per_row(self.beam_indices, beam), beam + offset, step),
            scores=scores,
        )

    def join(self, *others: Hypotheses) -> Hypotheses:
        """The sequences of all, one after the other."""
        return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), self, *others)

    def best(self, count: int) -> tuple[Hypotheses, Int[Array, "B count"]]:
        """The `count` sequences of the highest scores, in order, and their indices."""
        _, index = largest(self.scores, count)
        return self.take(index), index

    @staticmethod
    def init(
        inputs: PrefillInputs, beams: int, new_token_bucket: int, scores: Float[Array, " N"]
    ) -> Hypotheses:
        """The prompt without new tokens, repeated for `beams` beams."""
        batch, length = inputs.sequences.shape
        sequences = jnp.asarray(inputs.sequences)[:, None]
        return Hypotheses(
            sequences=jnp.broadcast_to(sequences, (batch, beams, length)),
            beam_indices=jnp.full((batch, beams, new_token_bucket), -1, jnp.int32),
            scores=jnp.broadcast_to(scores, (batch, beams)),
        )


def take_per_row(x: Array, index: Int[Array, "B M"]) -> Array:
    """x[b, index[b]] for each row b."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def largest(
    scores: Float[Array, "B M"], count: int
) -> tuple[Float[Array, "B count"], Int[Array, "B count"]]:
    """The `count` highest scores of each row, in order, and their indices.

    On a mesh every device computes its own rows: by default XLA all-gathers the rows first.
    """

    def largest_of(scores: Float[Array, "b M"]):
        value, index = jax.lax.top_k(scores, count)
        return value, index

    mesh = context_mesh()
    if mesh is not None:
        spec = partition_spec(scores.shape, ("rows",), mesh)
        return jax.shard_map(largest_of, in_specs=spec, out_specs=(spec, spec))(scores)
    # PERF(cpu): XLA sorts the whole row where it merges a later slice with the one inside top_k, a
    # hundred times slower; the barrier keeps them apart; benchmarks/generate.py. Not on a mesh:
    # there XLA's partitioner splits top_k in two and aborts at the barrier between them.
    return jax.lax.optimization_barrier(largest_of(scores))


def write_column(
    x: Int[Array, "B M L"], value: Int[Array, "B M"], position: Count
) -> Int[Array, "B M L"]:
    """Writes one column of every sequence of a row."""
    if position.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(x, value[..., None], position, axis=2)
    put = jax.vmap(lambda x, new, i: jax.lax.dynamic_update_slice_in_dim(x, new, i, axis=1))
    return put(x, value[..., None], position)


def read_column(x: Int[Array, "B M L"], position: Count) -> Int[Array, "B M"]:
    """Reads one column of every sequence of a row."""
    if position.ndim == 0:
        return jax.lax.dynamic_index_in_dim(x, position, 2, keepdims=False)
    return jnp.take_along_axis(x, position[:, None, None], axis=2)[..., 0]


def length_normalized(
    scores: Float[Array, " *any"],
    new_tokens: Int[Array, "*#any"],
    length_penalty: Float[Array, "*#any"],
) -> Float[Array, " *any"]:
    """Sums of log-probabilities divided by ``new_tokens ** length_penalty``."""
    return scores / new_tokens.astype(jnp.float32) ** length_penalty


def full_pool_is_final(
    pool: Hypotheses,
    best: Float[Array, " B"],
    length: Int[Array, ""],
    max_new_tokens: Int[Array, ""],
    length_penalty: Float[Array, ""],
    early_stopping: bool | str,
) -> Bool[Array, " B"]:
    """True for rows whose pool is full and can take no further beam, as in transformers'
    `BeamHypotheses.is_done`.

    Args:
        best: the sum of log-probabilities of the best candidate of this step.
        length: number of new tokens of that candidate.
    """
    worst = pool.scores[:, -1]
    full = worst > WORST
    if early_stopping is True:
        return full
    if early_stopping == "never":
        length = jnp.where(length_penalty > 0, max_new_tokens, length)
    return full & (worst >= length_normalized(best, length, length_penalty))


def result_length(beam_indices: Int[Array, "B N T"], start_len: Int[Array, ""]) -> Int[Array, ""]:
    """Columns of the longest sequence."""
    return start_len + jnp.max(jnp.sum(beam_indices >= 0, axis=-1))


def global_indices(beam_indices: Int[Array, "B M T"], beams: int) -> Int[Array, "BM T"]:
    """`beam_indices` counted over the beams of the whole batch, as transformers does."""
    offset = jnp.arange(beam_indices.shape[0], dtype=jnp.int32)[:, None, None] * beams
    return jnp.where(beam_indices >= 0, beam_indices + offset, -1).reshape(
        -1, beam_indices.shape[2]
    )
