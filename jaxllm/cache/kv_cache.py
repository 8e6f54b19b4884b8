"""KV cache: an immutable value of fixed shape, preallocated with zeros.

Shapes: B rows, K key/value heads, S cache slots, H head size.

Cache slots are columns of the sequence: slot ``j`` has the keys of column ``j`` of ``sequences``
(but see ``Branches``). Only ``mask`` says which slots hold real tokens, so left pads, right pads
and finished rows need no special case elsewhere. Keys of one layer are stored as ``[B*K, S, H]``:
with batch and heads merged, XLA updates them in place inside a while loop at every batch size. With
tensor parallelism they are ``[B, K, S, H]``, since a merged axis cannot be sharded by rows and by
heads; `head_axis` asks for it elsewhere (`nn/platform/attention.py`). ``*BK`` stands for either.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxllm.cache.attention_view import AttentionView, Branches, SlotIndices, make_view
from jaxllm.common.precision import float32_einsum
from jaxllm.parallel.field_axes import axes
from jaxllm.parallel.sharding import constrain, heads_are_sharded


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
        return slots[:, None] + offsets[None], {**hints, "indices_are_sorted": True}
    return jnp.where(slots < capacity, slots, capacity + offsets), hints


KV_AXES = axes("rows", "heads", None, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """Keys and values of one attention layer, ``[B*K, S, H]`` or ``[B, K, S, H]``."""

    k: Float[Array, "*BK S H"] = dataclasses.field(metadata=KV_AXES)
    v: Float[Array, "*BK S H"] = dataclasses.field(metadata=KV_AXES)

    @staticmethod
    def from_sequence(
        k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], *, head_axis: bool = False
    ) -> KV:
        """Keys and values of a whole sequence, as the projections return them."""
        return KV(heads_first(k, head_axis=head_axis), heads_first(v, head_axis=head_axis))

    @staticmethod
    def zeros(
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        *,
        head_axis: bool = False,
    ) -> KV:
        # Not `jnp.empty`: masked slots are multiplied by weight 0, and 0 * NaN is NaN.
        apart = head_axis or heads_are_sharded()
        heads = (batch, kv_heads) if apart else (batch * kv_heads,)
        shape = (*heads, capacity, head_dim)
        k, v = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        return KV(*constrain((k, v), *("rows", "heads")[: len(heads)], batch=batch))

    def write(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        slots: SlotIndices,
    ) -> KV:
        """Writes T new columns at `slots` (`write_columns`)."""
        return KV(write_heads(self.k, k, slots), write_heads(self.v, v, slots))

    @property
    def capacity(self) -> int:
        """Number of cache slots, S."""
        return self.k.shape[-2]

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """Leading sizes ``*BK``: (rows * heads,) or (rows, heads)."""
        return self.k.shape[:-2]

    # The operations that attention needs; cache variants override them.

    def scores(self, q: Float[Array, "*BK Q H"]) -> Float[Array, "*BK Q S"]:
        """Dot products of queries and keys, in float32."""
        return float32_einsum("...qh,...sh->...qs", q, self.k)

    def weighted_values(self, weights: Float[Array, "*BK Q S"]) -> Float[Array, "*BK Q H"]:
        """Weighted sums of values, in float32."""
        weights = weights.astype(self.v.dtype)
        return float32_einsum("...qs,...sh->...qh", weights, self.v)

    def prefix(self, length: int) -> KV:
        """The first `length` slots."""
        return jax.tree.map(lambda x: x[..., :length, :], self)

    def dequantized(self) -> KV:
        """The same keys and values in floating point; `self` unless quantized."""
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """KV cache of a decoder: keys and values of all layers, padding mask and positions.

    `length` counts the columns written so far, pads included: one number for all rows, or one per
    row. `next_position` counts each row's real tokens. Cross-attention keys and values are computed
    once, when generation starts.
    """

    layers: tuple[KV, ...]
    mask: Bool[Array, "B S"]
    """Padding mask: True where a slot holds a real token."""
    length: Int[Array, ""] | Int[Array, " R"]
    """Next free slot, of all rows or of each. R is B; with guidance R is B/2, since the cache holds
    the conditional rows and then their unconditional rows."""
    next_position: Int[Array, " B"]
    """Position of each row's next real token: the number of real tokens so far."""
    cross: tuple[KV, ...] | None = None
    """Cross-attention keys and values of the encoder output, per decoder layer."""
    cross_mask: Bool[Array, "B E"] | None = None
    token_type: Int[Array, " B"] | None = None
    """Token type of new tokens (GPT-2 with `token_type_ids`)."""
    positions: Int[Array, "B S"] | None = None
    """Position of the token in each slot, arbitrary in free slots; for windows and ALiBi only."""

    @staticmethod
    def empty(
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        *,
        counts_tokens: bool = False,
        head_axis: bool = False,
    ) -> Cache:
        """A cache without tokens. `counts_tokens`: attention needs the tokens' `positions`."""
        sizes = (batch, capacity, kv_heads, head_dim)
        return Cache(
            layers=tuple(KV.zeros(*sizes, dtype, head_axis=head_axis) for _ in range(layers)),
            mask=constrain(jnp.zeros((batch, capacity), bool), "rows"),
            length=jnp.zeros((), jnp.int32),
            next_position=constrain(jnp.zeros((batch,), jnp.int32), "rows"),
            positions=constrain(jnp.zeros((batch, capacity), jnp.int32), "rows")
            if counts_tokens
            else None,
        )

    @property
    def capacity(self) -> int:
        return self.mask.shape[1]

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def compact(self, capacity: int) -> Self:
        """Moves each row's real tokens to the first slots of a cache with `capacity` slots.

        Pads and tokens after a row's end are dropped, so `length` is then one number per row. The
        caller guarantees that `capacity` slots are enough.
        """
        size = self.capacity
        order = jnp.argsort(~self.mask, axis=1, stable=True)
        order = jnp.pad(order, ((0, 0), (0, max(capacity - size, 0))))[:, :capacity]

        def gather(x: Array):
            return jnp.take_along_axis(x, per_head(order, x)[..., None], axis=-2)

        mask = jnp.arange(capacity)[None] < self.next_position[:, None]
        positions = self.positions
        if positions is not None:
            positions = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), mask.shape)
        return self.replace(
            layers=jax.tree.map(gather, self.layers),
            mask=mask,
            length=self.next_position,
            positions=positions,
        )

    def repeat(self, n: int) -> Self:
        """Repeats each row n times, adjacently: one prefill serves all samples of a prompt."""
        if n == 1:
            return self
        batch = self.mask.shape[0]

        def rows(x: Array):
            if x.ndim == 0:
                return x
            per_row = x.reshape(batch, x.shape[0] // batch, *x.shape[1:])
            return jnp.repeat(per_row, n, axis=0).reshape(n * x.shape[0], *x.shape[1:])

        return jax.tree.map(rows, self)

    def first_rows(self, n: int) -> Self:
        """The first n rows. `length` is kept: one number, or already the lengths of these rows."""
        batch, length = self.mask.shape[0], self.length
        if n == batch:
            return self
        rows = jax.tree.map(
            lambda x: x[: x.shape[0] // batch * n] if x.ndim else x,
            self.replace(length=jnp.int32(0)),
        )
        return rows.replace(length=length)

    def append_rows(self, other: Self) -> Self:
        """Concatenates rows: this cache's, then `other`'s. Both have the same columns; `length` is
        this cache's."""
        rows = jax.tree.map(
            lambda x, y: jnp.concatenate([x, y]) if x.ndim else x,
            self.replace(length=jnp.int32(0)),
            other.replace(length=jnp.int32(0)),
        )
        return rows.replace(length=self.length)

    def truncate(self, length: Int[Array, " R"]) -> Self:
        """Truncates each row to its first `length` columns. Nothing moves; later slots become free.

        With guidance the cache has twice as many rows as `length`; both halves get the same.
        """
        row_length = jnp.tile(length, self.mask.shape[0] // length.shape[0])
        mask = self.mask & (jnp.arange(self.capacity)[None] < row_length[:, None])
        tokens = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        return self.replace(mask=mask, length=length, next_position=tokens)

    def align_lengths(self) -> Self:
        """The cache with the largest `length` for all rows: writes are then one slice update.
        Shorter rows get a gap, which the mask hides."""
        return self.replace(length=jnp.max(self.length))

    def slots_of_new_columns(self, mask: Bool[Array, "B T"], cache_is_empty: bool) -> SlotIndices:
        """Cache slots that `make_view` reserves for new columns."""
        return self.length

    def make_view(
        self,
        mask: Bool[Array, "B T"],
        *,
        cache_is_empty: bool = False,
        branches: Branches | None = None,
    ) -> tuple[AttentionView, Self]:
        """The view of T new columns after the cached ones, and the cache with these reserved.

        With `cache_is_empty` (prefill) the queries attend to each other only, not to free slots.
        With `branches` the new columns are alternatives for one position, not a sequence.
        """
        mask, T = jnp.asarray(mask), mask.shape[1]
        steps = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
        if branches is not None:
            steps = jnp.broadcast_to(jnp.any(mask, axis=-1, keepdims=True), mask.shape)
        counts = self.next_position[:, None] + steps.astype(jnp.int32)
        slots = self.slots_of_new_columns(mask, cache_is_empty)
        new_mask = write_columns(self.mask, mask, slots)
        reserved = self.replace(mask=new_mask, length=self.length + T, next_position=counts[:, -1])
        positions, slot_positions = jnp.maximum(counts - 1, 0), self.positions
        if slot_positions is not None:
            slot_positions = write_columns(slot_positions, positions, slots)
            reserved = reserved.replace(positions=slot_positions)
        if cache_is_empty:
            return dataclasses.replace(make_view(mask), write_slots=slots), reserved
        key_columns = jnp.arange(self.capacity, dtype=jnp.int32)
        lengths = jnp.asarray(self.length)
        offsets = jnp.expand_dims(jnp.arange(T, dtype=jnp.int32), tuple(range(lengths.ndim)))
        query_columns = lengths[..., None] + offsets
        if branches is None:
            columns = jax.lax.broadcasted_iota(jnp.int32, (mask.shape[0], T, self.capacity), 2)
            visible = new_mask[:, None, :] & (columns <= query_columns.reshape(-1, T, 1))
        else:
            visible = new_mask[:, None, :] & branches.seen
            key_columns, query_columns = branches.columns, branches.columns_of(query_columns)
        view = AttentionView(
            positions=positions,
            query_columns=query_columns,
            key_columns=key_columns,
            visible=visible[:, None],
            rope_length=counts[:, -1:],
            write_slots=slots,
            used_slots=jnp.max(self.length) + T,
            query_index=None if slot_positions is None else positions,
            key_index=slot_positions,
        )
        return view, reserved
