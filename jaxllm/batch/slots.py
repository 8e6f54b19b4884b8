"""Arrays of the batch engine: slots, their input rows and their output sequences.

A row starts at position 0 of its slot, without left padding, and has its own length, random key and
settings, so its result does not depend on other rows. The first axis of every array is slots; in
the KV cache, slots and heads share one axis unless a mesh shards heads. `SlotStrategy` decodes
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxllm.cache.attention_view import AttentionView, Branches, SlotIndices
from jaxllm.cache.kv_cache import Cache, per_head
from jaxllm.generation.processors import LogitsProcessorList


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """Settings of B rows."""

    processors: LogitsProcessorList
    """Logits processors whose leaves have a leading row axis (`stack_lists`)."""
    eos: Int[Array, "B E"]
    """EOS token ids, padded with -1."""
    max_length: Int[Array, " B"]
    """Maximum sequence length, prompt included."""
    sampled_rows: Bool[Array, " B"]
    """True for rows that sample; the others take the best token."""
    uses_stop_list: Bool[Array, "B M"]
    """True for the lists of stop strings, among the M of the program, that the row uses."""
    length_penalty: Float[Array, " B"]
    """Beam search only."""


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
        source = (jnp.arange(self.capacity) - offset[:, None]) % self.capacity

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
            key_columns=(slots - self.offset[:, None]) % self.capacity,
            visible=reserved.mask[:, None, None, :],
            used_slots=None,
        )
        return view, reserved.replace(next_slot=(self.next_slot + 1) % self.capacity)

    def slots_of_new_columns(self, mask: Bool[Array, "B T"], cache_is_empty: bool) -> SlotIndices:
        if not cache_is_empty:
            return self.next_slot
        columns = self.offset[:, None] + jnp.arange(mask.shape[1], dtype=jnp.int32)
        return jnp.where(mask, columns % self.capacity, self.capacity)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """R prompts to prefill and write into slots, as host arrays."""

    tokens: Int[Array, "R P"]
    """Decoder prompts, padded to their bucket."""
    prompt_length: Int[Array, " R"]
    """Length of each decoder prompt."""
    key_data: UInt32[Array, "R 3"]
    """Seed, number of the row and number of the sample, which make the row's random key."""
    settings: RowSettings
    encoder: dict[str, Any]
    """Encoder inputs of `model.init_cache`, of an encoder-decoder."""

    def keys(self) -> Key[Array, " R"]:
        """The keys that `generate(..., key=seed, row_ids=[row])` gives its samples."""

        def key_of(seed: Array, row: Array, sample: Array) -> Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), sample)

        return jax.vmap(key_of)(*self.key_data.T)


class SlotOutputs(NamedTuple):
    """The M sequences of each slot, finished or not."""

    tokens: Int[Array, "B M L"]
    """Prompt and new tokens; columns beyond `length` have no meaning."""
    prompt_length: Int[Array, " B"]
    """Length of the decoder prompt."""
    length: Int[Array, "B M"]
    """Length of each sequence, prompt included."""
    stopped: Bool[Array, "B M"]
    """True if EOS or a stop string ended the sequence."""
    first_nonfinite_step: Int[Array, " B"]
    """Number of the new token at which the logits were not finite, or -1."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """State of all slots; `prefill_slots` and `decode_slots` (programs.py) update it in place."""

    state: Any
    """The strategy's state, one row per slot. Random keys are stored as raw key data."""
    unfinished: Bool[Array, " B"]
    """True while the slot's row is not finished."""
    settings: RowSettings

    @property
    def count(self) -> int:
        return self.unfinished.shape[0]
