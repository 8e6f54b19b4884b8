"""Positions other than RoPE: sinusoids (Vaswani et al. 2017, arXiv:1706.03762), which are computed
and not learned, and the biases of T5 and ALiBi."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm.nn.linear import Embedding

EXACT = 2**11
"""Products of positions below 2**13 with multiples of 1 / EXACT have no rounding error."""


@dataclasses.dataclass(frozen=True)
class Sinusoids:
    """Sines of a position at falling frequencies, then their cosines.

    Frequency k is ``10000 ** (-k / steps)``. Marian and Pegasus have as many steps as frequencies.
    M2M100 and XGLM have one step less, so that the last frequency is 1 / 10000.
    """

    features: int
    """Width of the result; an even number."""
    steps: int
    zero_row: int | None = None
    """Number of a position whose vector is zero, fairseq's padding; None: there is none."""

    def __call__(self, positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Float32 vectors of positions.

        The turns of each sine are reduced to a fraction before they are rounded, so that a large
        position is as precise as a small one.
        """
        turns = self._frequencies()[None, None] / (2 * math.pi)
        coarse = np.round(turns * EXACT) / EXACT
        fine = (turns - coarse).astype(np.float32)
        x = positions[..., None].astype(jnp.float32)
        whole = x * coarse.astype(np.float32)
        angles = 2 * math.pi * ((whole - jnp.round(whole)) + x * fine)
        vectors = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        if self.zero_row is None:
            return vectors
        return jnp.where(positions[..., None] == self.zero_row, 0.0, vectors)

    def table(self, rows: int) -> Float[np.ndarray, "P D"]:
        """The vectors of the first positions in float32, as files store them."""
        angles = np.arange(rows)[:, None] * self._frequencies()
        table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        if self.zero_row is not None:
            table[self.zero_row] = 0
        return table

    def _frequencies(self) -> Float[np.ndarray, " F"]:
        """Radians a position, in float64."""
        return 1 / 10000.0 ** (np.arange(self.features // 2) / self.steps)


@functools.lru_cache
def buckets_by_distance(num_buckets: int, max_distance: int) -> np.ndarray:
    """Bucket of each distance 0..max_distance: exact up to half the buckets, logarithmic above.

    The table is computed on the host in float32: with bfloat16, or an accelerator's logarithm, a
    distance may get the wrong bucket.

    >>> buckets_by_distance(8, 20).tolist()
    [0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7]
    """
    exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(exact)
    scale = np.float32(math.log(max_distance / exact))
    large = exact + (np.log(ratio) / scale * np.float32(num_buckets - exact)).astype(np.int32)
    table = np.where(distance < exact, distance, np.minimum(large, num_buckets - 1))
    return table.astype(np.int32)


class RelativeBias(nnx.Module):
    """T5's relative position bias (Raffel et al. 2019, arXiv:1910.10683, section 2.1): a learned
    scalar per head and bucket of the distance key - query.

    Distances are between columns of the sequence, so left padding does not change the bias, and a
    decode step gets the same bias as the uncached call.
    """

    def __init__(
        self,
        num_buckets: int,
        max_distance: int,
        heads: int,
        *,
        bidirectional: bool,
        std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        self.table = Embedding(
            num_buckets, heads, std=std, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.bidirectional = bidirectional

    def __call__(
        self,
        query_columns: Int[Array, " T"] | Int[Array, "B T"],
        key_columns: Int[Array, " S"] | Int[Array, "B S"],
    ) -> Float[Array, "#B N T S"]:
        return jax.lax.platform_dependent(
            self.table.weight[...],
            self.buckets(query_columns, key_columns),
            tpu=self._by_product,
            default=self._by_gather,
        )

    def buckets(
        self,
        query_columns: Int[Array, " T"] | Int[Array, "B T"],
        key_columns: Int[Array, " S"] | Int[Array, "B S"],
    ) -> Int[Array, "#B T S"]:
        """Bucket of the distance of each query and key."""
        query_columns = query_columns.reshape(-1, query_columns.shape[-1])
        key_columns = key_columns.reshape(-1, 1, key_columns.shape[-1])
        distance = key_columns - query_columns[..., None]
        num_buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        table = jnp.asarray(buckets_by_distance(num_buckets, self.max_distance))
        absolute = jnp.abs(distance) if self.bidirectional else jnp.maximum(-distance, 0)
        bucket = table[jnp.minimum(absolute, self.max_distance)]
        if self.bidirectional:
            bucket = bucket + jnp.where(distance > 0, num_buckets, 0)
        return bucket

    def _by_gather(
        self, table: Float[Array, "buckets N"], bucket: Int[Array, "B T S"]
    ) -> Float[Array, "B N T S"]:
        # `rows`, since the table is sharded by heads, not by its first axis as a vocabulary is.
        return self.table.rows(table, bucket).transpose(0, 3, 1, 2)

    def _by_product(
        self, table: Float[Array, "buckets N"], bucket: Int[Array, "B T S"]
    ) -> Float[Array, "B N T S"]:
        """The bias as a product of the table with 1 for the bucket of a pair and 0 for all others,
        exact for finite entries."""
        # PERF(tpu): a gather has the heads in the lanes, and XLA copies the result in each pass of
        # each layer; docs/decisions/tpu-training-step.md. The highest precision rounds no entry.
        is_bucket = bucket[:, None] == jnp.arange(len(table))[None, :, None, None]
        chosen, entries = is_bucket.astype(jnp.float32), table.astype(jnp.float32)
        highest = jax.lax.Precision.HIGHEST
        bias = jnp.einsum("bets,en->bnts", chosen, entries, precision=highest)
        return bias.astype(self.table.dtype)


def alibi_slopes(heads: int) -> np.ndarray:
    """Slope of each head, float32: powers of ``2 ** (-8 / n)`` for a power of two n.

    Other numbers of heads have the slopes of the next smaller power of two, n, and then every
    other slope of 2n heads.

    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    n = 2 ** math.floor(math.log2(heads))
    powers = [*(2 ** (-8 * (i + 1) / n) for i in range(n))]
    powers += [2 ** (-8 * (2 * i + 1) / (2 * n)) for i in range(heads - n)]
    return np.asarray(powers, np.float32)


class Alibi(nnx.Module):
    """Position bias of ALiBi, attention with linear biases (Press et al. 2021, arXiv:2108.12409): a
    slope for each head times the distance key - query.

    Distances count real tokens, so padding does not change the bias.
    """

    def __init__(self, heads: int):
        self.heads = heads

    def __call__(
        self, query_index: Int[Array, "B T"], key_index: Int[Array, "B S"]
    ) -> Float[Array, "B N T S"]:
        # transformers multiplies the slopes by the keys' indices: the same up to a constant of each
        # query, but less exact for long texts.
        distance = key_index[:, None, :] - query_index[..., None]
        slopes = jnp.asarray(alibi_slopes(self.heads))
        return slopes[None, :, None, None] * distance[:, None].astype(jnp.float32)
