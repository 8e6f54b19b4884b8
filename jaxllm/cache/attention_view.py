"""Positions and attention mask of a forward call, from the padding mask."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

SlotIndices = Int[Array, ""] | Int[Array, " B"] | Int[Array, "B T"]
"""Cache slots of T new columns: the first one, for all rows or per row, or one for each column."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceMask:
    """Attention mask of whole sequences by its parts, from which kernels need no [T, S] array."""

    keys: Bool[Array, "B S"]
    """Padding mask of the keys."""
    query_columns: Int[Array, " T"] | None = None
    """Causal: a query attends to keys up to its own column. None: to keys on both sides."""
    query_segments: Int[Array, "B T"] | None = None
    """Document of each query in packed rows; it attends to keys of the same document."""
    key_segments: Int[Array, "B S"] | None = None
    query_index: Int[Array, "B T"] | None = None
    """Index of each query among the real tokens of its row; with a window only."""
    key_index: Int[Array, "B S"] | None = None
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Causal: a query attends to the last `window` real tokens, its own included. Otherwise to
    `window` real tokens on either side and its own."""

    @property
    def hides_pads_only(self) -> bool:
        """True if all queries of a row attend to the same keys."""
        return self.query_columns is None and self.query_segments is None and self.window is None

    def array(self) -> Bool[Array, "B 1 #T S"]:
        """The mask as an array: True where the query attends to the key."""
        visible = self.keys[:, None, None, :]
        if self.query_columns is not None:
            columns = jnp.arange(self.keys.shape[1], dtype=jnp.int32)
            visible = visible & (columns[None] <= self.query_columns[:, None])[None, None]
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[:, :, None] == self.key_segments[:, None, :]
            visible = visible & same[:, None]
        if self.window is not None:
            assert self.query_index is not None
            assert self.key_index is not None
            if self.query_columns is not None:
                return visible & near(self.query_index, self.key_index, self.window)
            distance = self.key_index[:, None, :] - self.query_index[..., None]
            visible = visible & (jnp.abs(distance) <= self.window)[:, None]
        return visible


def mask_array(mask: Bool[Array, "B 1 #T S"] | SequenceMask) -> Bool[Array, "B 1 #T S"]:
    """An attention mask as an array."""
    return mask.array() if isinstance(mask, SequenceMask) else mask


def near(
    query_index: Int[Array, "B T"], key_index: Int[Array, "B S"], window: int | Int[Array, ""]
) -> Bool[Array, "B 1 T S"]:
    """True at keys later than `window` real tokens before the query."""
    return (key_index[:, None, :] > query_index[..., None] - window)[:, None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionView:
    """Positions and attention mask of one forward call, from the padding mask and the slots."""

    positions: Int[Array, "B T"]
    """Position of each query, counting real tokens only; pads get a valid position too."""
    query_columns: Int[Array, " T"] | Int[Array, "B T"]
    """Column of the sequence that each query is in; differences give T5's relative bias."""
    key_columns: Int[Array, " S"] | Int[Array, "B S"]
    """Column of the sequence that each key is in."""
    visible: Bool[Array, "B 1 #T S"] | SequenceMask
    """Attention mask: True where the query attends to the key, or the parts that give it."""
    rope_length: Int[Array, "#B #T"]
    """Length of each query's own sequence, for RoPE types that depend on it: 1 + the largest
    position of a real token so far in its row, or in its document of a packed row."""
    write_slots: SlotIndices | None
    """Cache slot of the first query (for all rows or per row), or of each query; None: no cache."""
    used_slots: Int[Array, ""] | None = None
    """Only the first `used_slots` cache slots hold tokens; None: any slot may."""
    query_index: Int[Array, "B T"] | None = None
    """Index of each query among the real tokens of its row, which is its position unless the caller
    gave `position_ids`; None if no layer has a window or ALiBi."""
    key_index: Int[Array, "B S"] | None = None
    """Index of each key among the real tokens of its row."""

    def for_layer(self, window: int | None) -> AttentionView:
        """The view for a layer that attends to the last `window` tokens; None: to all."""
        view = self if window is None else self.within(window)
        return dataclasses.replace(view, query_index=None, key_index=None)

    def within(self, window: int | Int[Array, ""]) -> AttentionView:
        """The view with attention limited to the last `window` real tokens, the query's own
        included, or without a causal mask to `window` on either side. Padding does not count."""
        assert self.query_index is not None
        assert self.key_index is not None
        index = (self.query_index, self.key_index)
        if isinstance(self.visible, SequenceMask) and isinstance(window, int):
            parts = dict(zip(("query_index", "key_index"), index, strict=True))
            visible = dataclasses.replace(self.visible, window=window, **parts)
        else:
            visible = mask_array(self.visible) & near(*index, window)
        return dataclasses.replace(self, visible=visible)

    def with_mask_array(self) -> AttentionView:
        """The view with the attention mask as an array."""
        return dataclasses.replace(self, visible=mask_array(self.visible))


def make_view(
    mask: Bool[Array, "B T"],
    *,
    causal: bool = True,
    segments: Int[Array, "B T"] | None = None,
) -> AttentionView:
    """The view of one uncached call over a whole sequence.

    With `segments` (packing) a row holds several documents, one after the other. Each attends to
    itself only, and its positions start at 0.
    """
    mask, T = jnp.asarray(mask), mask.shape[1]
    counts = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    slots = jnp.arange(T, dtype=jnp.int32)
    rope_length = counts[:, -1:]
    if segments is not None:
        segments = jnp.asarray(segments)
        earlier_tokens = jnp.where(document_starts(segments), counts - mask.astype(jnp.int32), 0)
        counts = counts - jax.lax.cummax(earlier_tokens, axis=1)
    positions = jnp.maximum(counts - 1, 0)
    if segments is not None:
        rope_length = document_lengths(positions, mask, segments)
    return AttentionView(
        positions=positions,
        query_columns=slots,
        key_columns=slots,
        visible=SequenceMask(
            keys=mask,
            query_columns=slots if causal else None,
            query_segments=segments,
            key_segments=segments,
        ),
        rope_length=rope_length,
        write_slots=None,
        query_index=positions,
        key_index=positions,
    )


def document_starts(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True at the first token of each document of a packed row.

    >>> document_starts(jnp.array([[1, 1, 2, 2, 0]])).tolist()
    [[True, False, True, False, True]]
    """
    previous = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return segments != previous


def document_lengths(
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T"]:
    """1 + the largest position of a real token in each token's row, or in its document of a packed
    row. A pad counts by its own position alone.

    >>> mask, segments = jnp.array([[1, 1, 1, 1, 0]], bool), jnp.array([[1, 1, 2, 2, 0]])
    >>> document_lengths(jnp.array([[0, 5, 0, 1, 9]]), mask, segments).tolist()
    [[6, 6, 2, 2, 10]]
    """
    B, T = positions.shape
    largest = jnp.where(mask, positions, -1)
    if segments is None:
        longest = jnp.max(largest, axis=1, keepdims=True)
    else:
        number = jnp.cumsum(document_starts(segments), axis=1) - 1 + T * jnp.arange(B)[:, None]
        number = number.reshape(-1)
        by_document = jax.ops.segment_max(largest.reshape(-1), number, num_segments=B * T)
        longest = by_document[number].reshape(B, T)
    return jnp.where(mask, longest, positions) + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches:
    """Alternatives for the next position of a row, one per new column: beams or candidates.

    Each cache slot holds a token of one branch, and a branch attends to the slots of its ancestors
    only. Reordering branches therefore moves no keys and values.
    """

    seen: Bool[Array, "B T S"]
    """True at the slots that each branch attends to, its own new one included."""
    columns: Int[Array, " S"] | Int[Array, "B S"]
    """Column of the sequence that each slot belongs to, for all rows or for each."""

    def columns_of(
        self, slots: Int[Array, " T"] | Int[Array, "B T"]
    ) -> Int[Array, " T"] | Int[Array, "B T"]:
        """Looks up the columns that `slots` belong to."""
        if self.columns.ndim == 1 or slots.ndim == 1:
            return self.columns[..., slots]
        return jnp.take_along_axis(self.columns, slots, axis=1)
