"""T5's relative position bias (Raffel et al. 2019, arXiv:1910.10683, section 2.1)."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm.nn.linear import Embedding


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
    """Relative position bias: a learned scalar per head and bucket of the distance key - query.

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
        query_columns = query_columns.reshape(-1, query_columns.shape[-1])
        key_columns = key_columns.reshape(-1, 1, key_columns.shape[-1])
        distance = key_columns - query_columns[..., None]
        num_buckets = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        table = jnp.asarray(buckets_by_distance(num_buckets, self.max_distance))
        absolute = jnp.abs(distance) if self.bidirectional else jnp.maximum(-distance, 0)
        bucket = table[jnp.minimum(absolute, self.max_distance)]
        if self.bidirectional:
            bucket = bucket + jnp.where(distance > 0, num_buckets, 0)
        # `rows`, since the table is sharded by heads, not by its first axis as a vocabulary is.
        return self.table.rows(self.table.weight[...], bucket).transpose(0, 3, 1, 2)
