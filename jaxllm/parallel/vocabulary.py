"""Choices among scores that are sharded over the vocabulary: no device holds a whole row.

Each device searches its own shard and sends its few candidates. Results are those of one device to
the bit: entries are added in the same order, and ties go to the first column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxllm.parallel.sharding import TENSOR, context_mesh, partition_spec


def vocabulary_shards(x: Float[Array, "B V"]) -> int:
    """Number of shards that the vocabulary of these rows is split into on the mesh; 1 without."""
    mesh = context_mesh()
    return 1 if mesh is None or x.shape[1] % mesh.shape[TENSOR] else mesh.shape[TENSOR]


def top_k(x: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """`jax.lax.top_k` of each row: the `k` largest entries and their columns."""
    shards = vocabulary_shards(x)
    if shards == 1:
        values, columns = jax.lax.top_k(x, k)  # a list
        return values, columns

    def of_shard(x: Float[Array, "b v"]) -> tuple[Array, Array]:
        values, columns = jax.lax.top_k(x, min(k, x.shape[1]))
        columns = columns + jax.lax.axis_index(TENSOR) * x.shape[1]
        # In the order of the shards, so that of equal entries the first column comes first.
        values, columns = (_gathered(y) for y in (values, columns))
        values, order = jax.lax.top_k(values, k)
        return values, jnp.take_along_axis(columns, order, axis=1)

    return _in_shards(of_shard, x)


def argmax(
    x: Float[Array, "B V"], of_rows: Callable[[Float[Array, "b v"]], Int[Array, " b"]]
) -> Int[Array, " B"]:
    """Column of the largest entry of each row; `of_rows` computes it for unsharded rows."""
    if vocabulary_shards(x) == 1:
        return of_rows(x)

    def of_shard(x: Float[Array, "b v"]) -> Array:
        column = of_rows(x)
        value = jnp.take_along_axis(x, column[:, None], axis=1)
        columns = column[:, None] + jax.lax.axis_index(TENSOR) * x.shape[1]
        shard = jnp.argmax(_gathered(value), axis=1)
        return jnp.take_along_axis(_gathered(columns), shard[:, None], axis=1)[:, 0]

    return _in_shards(of_shard, x)


def has_blocks(x: Float[Array, "B V"], size: int) -> bool:
    """True if `race` can split the sharded rows into blocks: none spans more than two shards."""
    shards = vocabulary_shards(x)
    return shards > 1 and x.shape[1] // shards >= size


def race(
    weights: Float[Array, "B V"], times: Float[Array, "B blocks+size"], size: int
) -> Int[Array, " B"]:
    """Column drawn in two steps: a block of `size` columns, then a column in the block.

    In each step the item with the smallest time by weight wins. The weights beyond the last column
    are 0. A block is computed by the shard in which it begins, with the columns of the next shard
    that it needs.
    """
    count = times.shape[1] - size

    def of_shard(weights: Float[Array, "b v"], times: Float[Array, "b n"]) -> Array:
        shard, shards = jax.lax.axis_index(TENSOR), jax.lax.axis_size(TENSOR)
        columns = weights.shape[1]
        to_previous = [(i, i - 1) for i in range(1, shards)]
        after = jax.lax.ppermute(weights[:, :size], TENSOR, to_previous)
        start = -(shard * columns) % size  # of the first block that begins here
        own = -(-columns // size)
        padded = jnp.pad(jnp.concatenate([weights, after], axis=1), ((0, 0), (0, size)))
        blocks = jax.lax.dynamic_slice_in_dim(padded, start, own * size, axis=1)
        blocks = blocks.reshape(-1, own, size)
        first = (shard * columns + start) // size
        begins_here = start + size * jnp.arange(own) < columns

        sums = jnp.where(begins_here, jnp.sum(blocks, axis=-1), 0.0)
        whole = jnp.zeros((len(sums), count + own), sums.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(whole, sums, first, axis=1)
        sums = jax.lax.psum(whole[:, :count], TENSOR)
        block = jnp.argmin(times[:, :count] / sums, axis=-1)

        number = block - first
        is_own = (number >= 0) & (number < own) & (start + size * number < columns)
        entries = jnp.take_along_axis(blocks, number[:, None, None], axis=1, mode="clip")[:, 0]
        entries = jax.lax.psum(jnp.where(is_own[:, None], entries, 0.0), TENSOR)
        return block * size + jnp.argmin(times[:, count:] / entries, axis=-1)

    return _in_shards(of_shard, weights, times)


def _gathered(x: Float[Array, "b n"] | Int[Array, "b n"]) -> Any:
    """The columns of all shards, side by side."""
    return jax.lax.all_gather(x, TENSOR, axis=1, tiled=True)


def _in_shards(function: Callable[..., Any], x: Float[Array, "B V"], *rows: Array) -> Any:
    """The function of each device's shard of x and its rows of other arrays."""
    mesh = context_mesh()
    assert mesh is not None
    whole = partition_spec(x.shape, ("rows", "vocab"), mesh)
    of_rows = PartitionSpec(whole[0])
    run = partial(jax.shard_map, mesh=mesh, out_specs=of_rows, check_vma=False)
    return run(function, in_specs=(whole, *[of_rows] * len(rows)))(x, *rows)
