"""Layout of keys and values in a cache, and writes of new columns.

Shapes: B rows, K key/value heads, S cache slots, H head size. ``*BK`` is ``B*K``, or ``B, K`` where
heads have an axis of their own (`head_axis`, or a mesh that shards heads); see `kv_cache`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxllm.cache.attention_view import SlotIndices
from jaxllm.parallel.mesh import heads_are_sharded
from jaxllm.parallel.sharding import constrain


def heads_first(x: Float[Array, "B S K H"], *, head_axis: bool = False) -> Float[Array, "*BK S H"]:
    """Keys or values of a whole sequence in the layout of the cache."""
    B, S, K, H = x.shape
    x = x.transpose(0, 2, 1, 3)
    if head_axis or heads_are_sharded():
        return constrain(x, "rows", "heads")
    return x.reshape(B * K, S, H)


def per_head(
    index: Shaped[Array, " B *rest"], x: Shaped[Array, "*BK S H"]
) -> Shaped[Array, " ..."]:
    """Repeats a per-row array for each head of x: [*BK, *rest]."""
    if x.ndim == 3:
        return jnp.repeat(index, x.shape[0] // index.shape[0], axis=0)
    return jnp.broadcast_to(index[:, None], (*x.shape[:2], *index.shape[1:]))


def write_heads(
    old: Shaped[Array, "*BK S H"], new: Shaped[Array, "B T K H"], slots: SlotIndices
) -> Shaped[Array, "*BK S H"]:
    """Writes T columns of every head into `old`; see `write_columns`."""
    if jnp.ndim(slots) == 1 and slots.shape[0] == 1:  # one row: written in one piece
        slots = slots[0]
    new = new.transpose(0, 2, 1, 3).astype(old.dtype)
    if old.ndim == 3:
        slots = slots if jnp.ndim(slots) == 0 else per_head(slots, old)
        return write_columns(old, new.reshape(-1, *new.shape[2:]), slots)
    if jnp.ndim(slots) == 0:
        return jax.lax.dynamic_update_slice_in_dim(old, new, slots, axis=2)
    index, hints = _scatter_index(slots, new.shape[2], old.shape[2])

    def write(head: Array, part: Array, i: Array) -> Array:
        return head.at[i].set(part, **hints)

    # Rows and heads are both axes of vmap: a scatter with their indices would all-gather the new
    # columns where heads are sharded; with heads as a part of what is written a TPU transposes
    # the cache.
    return jax.vmap(jax.vmap(write, in_axes=(0, 0, None)))(old, new, index)


def write_columns(
    rows: Shaped[Array, "B S *rest"], new: Shaped[Array, "B T *rest"], slots: SlotIndices
) -> Shaped[Array, "B S *rest"]:
    """Writes T columns into every row.

    Args:
        slots: first slot of all rows, where T columns fit. Or the first slot of each row [B], or
            the slot of each column [B, T]: columns at S or beyond are dropped; the others differ.
    """
    if jnp.ndim(slots) == 0:
        return jax.lax.dynamic_update_slice_in_dim(rows, new, slots, axis=1)
    index, hints = _scatter_index(slots, new.shape[1], rows.shape[1])
    # vmap over rows: if rows are sharded, one scatter would all-gather the indices.
    return jax.vmap(lambda row, part, i: row.at[i].set(part, **hints))(rows, new, index)


def _scatter_index(
    slots: SlotIndices, columns: int, capacity: int
) -> tuple[Int[Array, "B T"], dict[str, Any]]:
    """Slot of every column, all different in a row, and what a scatter can rely on.

    A TPU writes one row after another in a loop unless it knows that the indices are unique.
    """
    offsets = jnp.arange(columns, dtype=jnp.int32)
    hints: dict[str, Any] = {"mode": "drop", "unique_indices": True}
    if jnp.ndim(slots) == 1:
        return slots[:, None] + offsets, {**hints, "indices_are_sorted": True}
    return jnp.where(slots < capacity, slots, capacity + offsets), hints
