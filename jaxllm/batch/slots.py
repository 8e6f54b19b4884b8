"""Arrays of the batch engine: slots, their input rows and their output sequences.

A row starts at position 0 of its slot, without left padding, and has its own length, random key and
settings, so its result does not depend on other rows. The first axis of every array is slots; in
the KV cache, slots and heads share one axis unless a mesh shards heads. On a mesh the first axis is
sharded over `data` and `fsdp`, the heads of the cache over `tensor`. `SlotStrategy` decodes slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, Shaped, UInt32

from jaxllm.cache.attention_view import AttentionView, Branches, SlotIndices
from jaxllm.cache.kv_cache import Cache, per_head
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.processors.base import RowProcessors
from jaxllm.generation.strategies.strategy import RUNNING
from jaxllm.parallel.field_axes import Axes, field_shardings, map_with_axes
from jaxllm.parallel.sharding import ROWS, context_mesh, partition_spec

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that determine the shapes of a pool's programs."""

    slots: int
    columns: int
    """Columns of a sequence, its prompt included."""
    encoder_columns: int | None = None
    """Columns of the encoder's input, of an encoder-decoder."""
    shards: int = 1
    """Number of shards of the slot axis on a mesh; divides `slots`."""
    beams: int = 1
    """Sequences that a slot decodes."""
    new_token_bucket: int = 0
    """Most new tokens, rounded up, where there are several beams; else 0."""

    @property
    def capacity(self) -> int:
        """KV-cache positions of a slot: the prompt once, new tokens once for each beam.

        >>> Sizes(16, 64).capacity, Sizes(16, 64, beams=4, new_token_bucket=32).capacity
        (64, 160)
        """
        return self.columns + (self.beams - 1) * self.new_token_bucket

    @property
    def prefill_rows(self) -> int:
        """Prompts of one prefill: a sixteenth of the slots. Decoding stops when as many slots are
        free, so that less than a sixteenth of them wait on average. A multiple of `shards` where
        there are enough."""
        count = max(1, self.slots // 16)
        return count - count % self.shards or count

    def with_slots(self, slots: int) -> Sizes:
        """The same with another number of slots, rounded up to a multiple of `shards`."""
        return dataclasses.replace(self, slots=-(-slots // self.shards) * self.shards)

    def max_new_tokens(self, prompt_length: int) -> int:
        """Most new tokens after a prompt."""
        columns = self.columns - prompt_length
        return columns if self.beams == 1 else min(columns, self.new_token_bucket)

    def with_half_the_new_tokens(self, prompt_length: int) -> Sizes | None:
        """The next smaller slots, of about half as many new tokens after a prompt; None if there
        are none.

        >>> sizes = Sizes(1, 64, beams=4, new_token_bucket=64).with_half_the_new_tokens(3)
        >>> sizes.columns, sizes.new_token_bucket, sizes.with_half_the_new_tokens(3).columns
        (64, 32, 32)
        """
        half_columns, half_new_tokens = (
            size // 2 if size > SMALLEST_BUCKET else 0
            for size in (self.columns, self.new_token_bucket)
        )
        max_new_tokens = max(half_columns - prompt_length, half_new_tokens)
        if max_new_tokens < 1:
            return None
        columns = bucket(prompt_length + max_new_tokens, SMALLEST_BUCKET)
        new_token_bucket = 0 if self.beams == 1 else bucket(max_new_tokens, SMALLEST_BUCKET)
        return dataclasses.replace(self, columns=columns, new_token_bucket=new_token_bucket)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """Settings of B rows."""

    processors: RowProcessors
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
    """Prompt and new tokens; columns beyond `counts` new ones have no meaning."""
    prompt_length: Int[Array, " B"]
    """Length of the decoder prompt."""
    counts: Int[Array, "B M"]
    """New tokens of each sequence, the end token included."""
    reasons: Int[Array, "B M"]
    """`RUNNING`, or why the sequence has ended; an index of `FINISH_REASONS`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """State of all slots; `prefill_slots` and `decode_slots` (programs.py) update it in place."""

    state: Any
    """The strategy's state, one row per slot. Random keys are stored as raw key data."""
    settings: RowSettings

    @property
    def unfinished(self) -> Bool[Array, " B"]:
        """True while the slot's row has not ended; False for free slots."""
        return self.state.reason == RUNNING

    @property
    def count(self) -> int:
        return self.state.reason.shape[0]


def with_shardings(shapes: T, mesh: Mesh | AbstractMesh | None, count: int) -> T:
    """Shapes of `count` slots with their shardings."""
    if mesh is None:
        # Not weakly typed: programs are compiled for the arrays that `empty_slots` makes of these.
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    replicated = NamedSharding(mesh, PartitionSpec())

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        if 0 in x.shape:  # programs return empty arrays replicated
            sharding = replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, shapes, field_shardings(shapes, mesh, batch=count))


def place(x: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Copies an array to the devices; by default to the default device."""
    return jax.device_put(x, sharding, may_alias=False)


def scatter_rows(
    old: Shaped[Array, "B ..."],
    new: Shaped[Array, "R ..."],
    slot_ids: Int[Array, " R"],
    axes: tuple[str, ...] = ("rows",),
) -> Shaped[Array, "B ..."]:
    """Replaces rows `slot_ids` of `old` in place.

    Row numbers beyond the last row are dropped. On a mesh each device writes the rows of its shard:
    only the new rows are communicated.

    Args:
        axes: the logical axes of the first dimensions of `old`.
    """

    def scatter(old: Array, new: Array, slot_ids: Array) -> Array:
        return old.at[slot_ids].set(new, mode="drop")

    mesh = context_mesh()
    if mesh is None:
        return scatter(old, new, slot_ids)

    def scatter_shard(old: Array, new: Array, slot_ids: Array) -> Array:
        in_shard = slot_ids - jax.lax.axis_index(ROWS) * old.shape[0]
        return scatter(old, new, jnp.where(in_shard < 0, old.shape[0], in_shard))

    spec = partition_spec(old.shape, axes, mesh)
    in_specs = (spec, PartitionSpec(None, *spec[1:]), PartitionSpec())
    return jax.shard_map(scatter_shard, in_specs=in_specs, out_specs=spec)(old, new, slot_ids)


def write_rows(old: T, new: T, slot_ids: Int[Array, " R"]) -> T:
    """Writes new rows into the slots `slot_ids`; one beyond the last slot is left out.

    Other axes of the new rows may be shorter than those of the slots; the rest is zero-filled.
    Masked keys and values are zeroed as well, since a NaN left there by the previous row would pass
    the mask (0 * NaN is NaN).
    """

    def write(
        axes: Axes,
        old: Shaped[Array, "B ..."] | Shaped[Array, ""],
        new: Shaped[Array, "R ..."] | Shaped[Array, ""],
    ):
        if old.ndim == 0:  # a number of all slots
            return old
        ids, own_axes = slot_ids, ("rows",)
        if "heads" in axes and old.ndim == 4:
            own_axes = ("rows", "heads")
        elif "heads" in axes:  # they share the first axis with rows
            heads = new.shape[0] // slot_ids.shape[0]
            ids = (slot_ids[:, None] * heads + jnp.arange(heads)[None]).reshape(-1)
        pads = [(0, size - rest) for size, rest in zip(old.shape[1:], new.shape[1:], strict=True)]
        padded = jnp.pad(jnp.asarray(new, old.dtype), [(0, 0), *pads])
        return scatter_rows(old, padded, ids, own_axes)

    return map_with_axes(write, old, new)
