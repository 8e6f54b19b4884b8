"""KV caches of independent rows, each of its own length: those of batch slots.

`SlotCache` writes every row's next column to a cache slot of its own, `RotatedCache` the next
columns of all rows to one cache slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.cache.attention_view import AttentionView, Branches, SlotIndices
from jaxllm.cache.kv_cache import Cache, per_head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCache(Cache):
    """KV cache of independent rows, each of its own length."""

    @classmethod
    def of(cls, cache: Cache) -> Self:
        rows = cache.mask.shape[:1]
        fields = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
        return cls(**{**fields, "length": jnp.broadcast_to(cache.length, rows)})

    def for_prompts(
        self, init_cache: Callable[[int], Cache], width: int, prompt_length: Int[Array, " R"]
    ) -> SlotCache:
        """An empty cache for the prefill of R prompts, whose rows then replace rows of this one.

        Args:
            init_cache: makes a cache of R rows with a number of columns.
            width: columns of the padded prompts.
        """
        return SlotCache.of(init_cache(width))

    def rows_of(self, cache: Cache) -> SlotCache:
        """Rows for this cache from one of the same columns, whose prompts begin in its first slot.

        Rows that are finished have a `length` of 0.
        """
        return SlotCache.of(cache)

    def align_lengths(self) -> Self:
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotatedCache(SlotCache):
    """KV cache of independent rows whose next columns all have the same cache slot.

    Column j of a row is in slot ``(offset + j) % S``, and a row's offset is chosen when its prompt
    is written. A decode step then updates keys and values with one slice, as in `generate`, however
    different the lengths of the rows are.
    """

    offset: Int[Array, " B"] = dataclasses.field(kw_only=True)
    """Cache slot of each row's first column."""
    next_slot: Int[Array, ""] = dataclasses.field(kw_only=True)
    """Cache slot of the next column of all unfinished rows: ``(offset + length) % S``."""

    @classmethod
    def of(cls, cache: Cache) -> Self:
        fields = vars(SlotCache.of(cache))
        zeros = jnp.zeros_like(fields["length"])
        return cls(**fields, offset=zeros, next_slot=jnp.int32(0))

    def for_prompts(
        self, init_cache: Callable[[int], Cache], width: int, prompt_length: Int[Array, " R"]
    ) -> SlotCache:
        """Empty cache for prompts that end before this cache's next slot."""
        offset = (self.next_slot - prompt_length) % self.capacity
        return self.of(init_cache(self.capacity)).replace(offset=offset, next_slot=self.next_slot)

    def rows_of(self, cache: Cache) -> SlotCache:
        rows = self.of(cache)
        offset = (self.next_slot - rows.next_position) % self.capacity
        source = (jnp.arange(self.capacity)[None] - offset[:, None]) % self.capacity

        def rotate(x: Array) -> Array:
            return jnp.take_along_axis(x, source, axis=1)

        def rotate_heads(x: Array) -> Array:
            return jnp.take_along_axis(x, per_head(source, x)[..., None], axis=-2)

        return rows.replace(
            layers=jax.tree.map(rotate_heads, rows.layers),
            mask=rotate(rows.mask),
            positions=None if rows.positions is None else rotate(rows.positions),
            offset=offset,
            next_slot=self.next_slot,
        )

    def make_view(
        self,
        mask: Bool[Array, "B T"],
        *,
        cache_is_empty: bool = False,
        branches: Branches | None = None,
    ) -> tuple[AttentionView, Self]:
        """`Cache.make_view` for one new column, or for whole prompts (`cache_is_empty`)."""
        if branches is not None or (mask.shape[1] > 1 and not cache_is_empty):
            raise ValueError("a rotated cache takes its new columns one at a time")
        view, reserved = super().make_view(mask, cache_is_empty=cache_is_empty)
        if cache_is_empty:
            return view, reserved
        slots = jnp.arange(self.capacity, dtype=jnp.int32)
        view = dataclasses.replace(
            view,
            key_columns=(slots[None] - self.offset[:, None]) % self.capacity,
            visible=reserved.mask[:, None, None, :],
            used_slots=None,
        )
        return view, reserved.replace(next_slot=(self.next_slot + 1) % self.capacity)

    def slots_of_new_columns(self, mask: Bool[Array, "B T"], cache_is_empty: bool) -> SlotIndices:
        if not cache_is_empty:
            return self.next_slot
        columns = self.offset[:, None] + jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
        return jnp.where(mask, columns % self.capacity, self.capacity)
