"""Arrays of the batch engine: slots, and the rows that are written into them.

A row starts at position 0 of its slot, without left padding, and has its own length, random key and
settings, so its result does not depend on other rows. The first axis of every array is slots; in
the KV cache, slots and heads share one axis unless a mesh shards heads. On a mesh the first axis is
sharded over `data` and `fsdp`, the heads of the cache over `tensor`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, Shaped

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.strategies.strategy import (
    RUNNING,
    AnyStrategy,
    DecodeSettings,
    PrefillInputs,
)
from jaxllm.models.decoder import Decoder
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
class PromptRows:
    """R prompts to prefill and write into slots: host arrays with a row axis, and the tables of
    stopping criteria, which all rows of a program share."""

    strategy: AnyStrategy
    settings: DecodeSettings
    inputs: PrefillInputs
    """Without left padding. The programs make the random keys."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """All slots on the device, each with the settings of its row; `prefill_slots` and
    `decode_slots` (programs.py) update them in place.

    A free slot keeps the state of the row that ended there, or none.
    """

    strategy: AnyStrategy
    settings: DecodeSettings
    state: Any
    """The strategy's state, one row for each slot. Random keys are stored as raw key data."""

    @classmethod
    def of(cls, rows: PromptRows, state: Any) -> Self:
        """The rows in a state of their strategy."""
        return cls(rows.strategy, rows.settings, None).with_state(state)

    def with_state(self, state: Any) -> Self:
        """The slots in another state. The cache of slots whose rows have ended gets a length of 0,
        so that attention reads no further than unfinished rows need."""

        def shortened(x: object) -> object:
            if not isinstance(x, Cache):
                return x
            return x.replace(length=jnp.where(state.reason == RUNNING, x.length, 0))

        keys = jax.random.key_data(state.keys)
        state = jax.tree.map(shortened, state, is_leaf=lambda x: isinstance(x, Cache))
        return dataclasses.replace(self, state=state.replace(keys=keys))

    def step(self, model: Decoder) -> Self:
        """One more token for every unfinished row; a row that has ended keeps its state."""
        before = self.state.replace(keys=jax.random.wrap_key_data(self.state.keys))
        after = self.strategy.step(model, before, self.settings)

        def select(axes: Axes, new: Array, old: Array) -> Array:
            # Keys and values of rows that have ended are never read.
            if "heads" in axes or new.ndim == 0:
                return new
            return jnp.where(self.unfinished.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return self.with_state(map_with_axes(select, after, before))

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
        if "rows" not in axes or old.ndim == 0:  # the same for all slots
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
