"""Arrays of slots: their shapes, empty ones, and new rows written into them.

On a mesh their first axis is sharded over `data` and `fsdp`, the heads of the cache over `tensor`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_strategies import SlotStrategy
from jaxllm.batch.slots import Arrivals, RowSettings, SlotCache, Slots
from jaxllm.models.decoder import Decoder
from jaxllm.parallel.field_axes import map_with_axes
from jaxllm.parallel.sharding import ROWS, context_mesh, partition, use

T = TypeVar("T")


def with_shardings(shapes: T, mesh: Mesh | None) -> T:
    """Shapes of slots with their shardings."""
    if mesh is None:
        # Not weakly typed: programs are compiled for the arrays that `empty_slots` makes of these.
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)

    def one(names, x):
        spec = partition(x.shape, names if x.ndim >= len(names) else names[:1], mesh)
        if 0 in x.shape:  # programs return empty arrays replicated
            spec = PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return map_with_axes(one, shapes)


def place(x: Any, sharding: Any = None) -> jax.Array:
    """Copies an array to the devices; by default to the default device."""
    return jax.device_put(x, sharding, may_alias=False)


def set_rows(
    old: Shaped[Array, "B ..."],
    new: Shaped[Array, "R ..."],
    at: Int[Array, " R"],
    axes: tuple[str, ...] = ("rows",),
) -> Shaped[Array, "B ..."]:
    """Replaces rows `at` of `old` in place.

    Row numbers beyond the last row are dropped. On a mesh each device writes the rows of its shard:
    only the new rows are communicated.

    Args:
        axes: the logical axes of the first dimensions of `old`.
    """

    def put(old, new, at):
        return old.at[at].set(new, mode="drop")

    mesh = context_mesh()
    if mesh is None:
        return put(old, new, at)

    def put_part(old, new, at):
        mine = at - jax.lax.axis_index(ROWS) * old.shape[0]
        return put(old, new, jnp.where(mine < 0, old.shape[0], mine))

    split = partition(old.shape, axes, mesh)
    whole_rows = PartitionSpec(None, *split[1:])
    return jax.shard_map(put_part, in_specs=(split, whole_rows, PartitionSpec()), out_specs=split)(
        old, new, at
    )


def put(old: T, new: T, at: Int[Array, " R"]) -> T:
    """Writes new rows into the slots `at`; one beyond the last slot is left out.

    Other axes of the new rows may be shorter than those of the slots; the rest is zero-filled.
    Masked keys and values are zeroed as well, since a NaN left there by the previous row would pass
    the mask (0 * NaN is NaN).
    """

    def one(names, old: Shaped[Array, "B ..."], new: Any):
        return put_layer(old, new, at) if "heads" in names else put_rows(old, new, at)

    return map_with_axes(one, old, new)


def put_rows(
    old: Shaped[Array, "B ..."], new: Any, at: Int[Array, " R"], axes: tuple[str, ...] = ("rows",)
) -> Shaped[Array, "B ..."]:
    """Replaces rows of `old`, padded with zeros to its columns; `axes` as in `set_rows`."""
    rest = [(0, have - got) for have, got in zip(old.shape[1:], new.shape[1:], strict=True)]
    return set_rows(old, jnp.pad(jnp.asarray(new, old.dtype), [(0, 0), *rest]), at, axes)


def put_layer(
    old: Shaped[Array, "*BK S H"], new: Shaped[Array, "*RK P H"], at: Int[Array, " R"]
) -> Shaped[Array, "*BK S H"]:
    """Replaces keys or values of some rows."""
    if old.ndim == 4:
        return put_rows(old, new, at, ("rows", "heads"))
    heads = new.shape[0] // at.shape[0]
    return put_rows(old, new, (at[:, None] * heads + jnp.arange(heads)).reshape(-1))


def slot_shapes(
    model: Decoder,
    strategy: SlotStrategy,
    sizes: Sizes,
    settings: RowSettings,
    mesh: Mesh | None = None,
) -> Slots:
    """The shapes, dtypes and shardings of slots.

    Args:
        settings: settings of any rows of the group, as host arrays.
    """
    count = sizes.slots
    arrays: dict[str, Any] = {
        "tokens": np.zeros((count, 1), np.int32),
        "start": np.zeros(count, np.int32),
        "draws": np.zeros((count, 3), np.uint32),
    }
    repeated = jax.tree.map(lambda x: np.repeat(x[:1], count, axis=0), settings)
    arrivals = Arrivals(**arrays, settings=repeated, encoder={})

    def before(model: Decoder, arrivals: Arrivals) -> Slots:
        cache = start_cache(model, count, sizes.capacity, sizes.source)
        return strategy.before(arrivals, cache, sizes)

    with use(mesh):
        shapes = jax.eval_shape(before, model, arrivals)
    return with_shardings(shapes, mesh)


def empty_slots(shapes: Any, settings: RowSettings) -> Any:
    """Slots without rows, made without compiling a program.

    Args:
        settings: of some row, [1]: those of a slot before its first row. (With zeros a filter would
            take its slow branch.)
    """

    def zeros(shape: Any) -> jax.Array:
        return place(np.zeros(shape.shape, shape.dtype), shape.sharding)

    def repeated(shape: Any, value: np.ndarray) -> jax.Array:
        return place(np.repeat(value, shape.shape[0], axis=0), shape.sharding)

    stated = jax.tree.map(repeated, shapes.settings, settings)
    rest = jax.tree.map(zeros, dataclasses.replace(shapes, settings=None))
    return dataclasses.replace(rest, settings=stated)


def start_cache(model: Decoder, count: int, capacity: int, source: int | None) -> SlotCache:
    """The cache of `count` slots; traced for its shapes alone."""
    encoder = {}
    if source is not None:
        shape = (count, source)
        encoder = {"input_ids": jnp.zeros(shape, jnp.int32)}
        encoder["attention_mask"] = jnp.zeros(shape, bool)
    return SlotCache.of(model.init_cache(count, capacity, **encoder))
