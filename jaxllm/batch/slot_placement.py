"""Arrays of slots: their shapes, empty ones, and new rows written into them.

On a mesh their first axis is sharded over `data` and `fsdp`, the heads of the cache over `tensor`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import PrefillBatch, RotatedCache, RowSettings, SlotCache, Slots
from jaxllm.cache.kv_cache import Cache
from jaxllm.models.decoder import Decoder
from jaxllm.nn.platform.decoding import writes_one_slot
from jaxllm.parallel.field_axes import Axes, field_shardings, map_with_axes
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import ROWS, context_mesh, partition_spec, use_mesh

T = TypeVar("T")


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
        if "heads" in axes:
            return write_layer(old, new, slot_ids)
        return write_padded_rows(old, new, slot_ids)

    return map_with_axes(write, old, new)


def write_padded_rows(
    old: Shaped[Array, "B ..."],
    new: Shaped[Array, "R ..."],
    slot_ids: Int[Array, " R"],
    axes: tuple[str, ...] = ("rows",),
) -> Shaped[Array, "B ..."]:
    """Replaces rows of `old`, padded with zeros to its columns; `axes` as in `scatter_rows`."""
    pads = [(0, size - length) for size, length in zip(old.shape[1:], new.shape[1:], strict=True)]
    new = jnp.pad(jnp.asarray(new, old.dtype), [(0, 0), *pads])
    return scatter_rows(old, new, slot_ids, axes)


def write_layer(
    old: Shaped[Array, "*BK S H"], new: Shaped[Array, "*RK P H"], slot_ids: Int[Array, " R"]
) -> Shaped[Array, "*BK S H"]:
    """Replaces keys or values of some rows; K heads share the first axis with rows or have their
    own."""
    if old.ndim == 4:
        return write_padded_rows(old, new, slot_ids, ("rows", "heads"))
    heads = new.shape[0] // slot_ids.shape[0]
    return write_padded_rows(old, new, (slot_ids[:, None] * heads + jnp.arange(heads)).reshape(-1))


def slot_shapes(
    model: Decoder,
    strategy: SlotStrategy,
    sizes: Sizes,
    settings: RowSettings,
    mesh: Mesh | AbstractMesh | None = None,
) -> Slots:
    """The shapes, dtypes and shardings of slots.

    Args:
        settings: settings of any rows of the group, as host arrays.
    """
    count = sizes.slots
    struct = jax.ShapeDtypeStruct
    arrays: dict[str, Any] = {
        "tokens": struct((count, 1), np.int32),
        "prompt_length": struct((count,), np.int32),
        "key_data": struct((count, 3), np.uint32),
    }
    repeated = jax.tree.map(lambda x: struct((count, *x.shape[1:]), x.dtype), settings)
    batch = PrefillBatch(**arrays, settings=repeated, encoder={})

    rotated = strategy.beams == 1 and writes_one_slot(platform_of_arrays(model))

    def initial_slots(model: Decoder, batch: PrefillBatch) -> Slots:
        cache = empty_cache(model, count, sizes.capacity, sizes.encoder_columns)
        cache = RotatedCache.of(cache) if rotated else SlotCache.of(cache)
        return strategy.initial_slots(batch, cache, sizes)

    with use_mesh(mesh):
        shapes = jax.eval_shape(initial_slots, model, batch)
    return with_shardings(shapes, mesh, count)


def empty_slots(shapes: Slots, settings: RowSettings) -> Slots:
    """Slots without rows, made without compiling a program.

    Args:
        settings: settings of one row, [1], which free slots get. (With zeros a filter would take
            its slow branch.)
    """

    def zeros(shape: jax.ShapeDtypeStruct | Array) -> jax.Array:
        return place(np.zeros(shape.shape, shape.dtype), shape.sharding)

    def repeated(shape: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
        return place(np.repeat(value, shape.shape[0], axis=0), shape.sharding)

    return Slots(
        state=jax.tree.map(zeros, shapes.state),
        unfinished=zeros(shapes.unfinished),
        settings=jax.tree.map(repeated, shapes.settings, settings),
    )


def empty_cache(model: Decoder, count: int, capacity: int, encoder_columns: int | None) -> Cache:
    """The cache of `count` slots; traced for its shapes alone."""
    encoder = {}
    if encoder_columns is not None:
        shape = (count, encoder_columns)
        encoder = {"input_ids": jnp.zeros(shape, jnp.int32)}
        encoder["attention_mask"] = jnp.zeros(shape, bool)
    return model.init_cache(count, capacity, **encoder)
