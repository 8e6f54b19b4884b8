"""Slots on a mesh: their first axis lies over `data` and `fsdp`, the heads of the cache over
`tensor`. Without a mesh all of this changes nothing."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxllm.parallel.sharding import ROWS, constrain, context_mesh, partition

T = TypeVar("T")


def of_layers(path: tuple) -> bool:
    """Whether an array of slots is keys or values of a layer."""
    return any(getattr(key, "name", None) in ("layers", "cross") for key in path)


def axes_of(path: tuple, x: Any) -> tuple[str, ...]:
    """Names of the first axes of an array of slots. Heads have one where `tensor` splits them."""
    return ("rows", "heads") if of_layers(path) and x.ndim == 4 else ("rows",)


def settled(slots: T) -> T:
    """The slots, split as every call gets them: one program serves the first and the next."""
    return jax.tree_util.tree_map_with_path(lambda path, x: constrain(x, *axes_of(path, x)), slots)


def with_places(shapes: T, mesh: Mesh | None) -> T:
    """Shapes of slots that say where the arrays lie."""
    if mesh is None:
        return shapes

    def one(path, x):
        spec = partition(x.shape, axes_of(path, x), mesh)
        if 0 in x.shape:  # programs give empty arrays back as whole ones
            spec = PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(one, shapes)


def place(x: Any, sharding: Any = None) -> jax.Array:
    """An array on the devices, which own it; by default on the default device."""
    return jax.device_put(x, sharding, may_alias=False)


def set_rows(
    old: Shaped[Array, "B ..."],
    new: Shaped[Array, "R ..."],
    at: Int[Array, " R"],
    axes: tuple[str, ...] = ("rows",),
) -> Shaped[Array, "B ..."]:
    """Rows `at` of `old` replaced in place.

    Row numbers beyond the last row are left out. On a mesh each device writes the rows that it has:
    only the new ones travel.

    Args:
        axes: as of `axes_of`.
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
