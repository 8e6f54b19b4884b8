"""Bringing arrays onto a mesh, where each process gives what it has, and finding the mesh again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.common.errors import InputError
from jaxllm.parallel.sharding import DATA, FSDP, batch_sharding, row_shards, tree_shardings


def row_share(mesh: Mesh) -> tuple[int, int]:
    """Which part of a batch's rows this process holds: (part, parts).

    Processes that a `tensor` axis spans hold the same rows, and so the same part.

    Raises:
        InputError: the mesh gives processes parts that overlap without being equal.
    """
    grid = mesh.devices.reshape(row_shards(mesh), -1)
    held: dict[int, list[int]] = {}
    for row, devices in enumerate(grid):
        for process in dict.fromkeys(device.process_index for device in devices):
            held.setdefault(process, []).append(row)
    parts = sorted(set(map(tuple, held.values())))
    if sum(map(len, parts)) != len(grid) or len(set(map(len, parts))) != 1:
        raise InputError(
            f"mesh: {dict(mesh.shape)} splits rows unevenly between {len(held)} processes; let "
            "data * fsdp be a multiple of them, or tensor a multiple of the devices of each"
        )
    return parts.index(tuple(held[jax.process_index()])), len(parts)


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """The rows of all processes as global arrays.

    Args:
        batch: this process's rows (`row_share`), the same number in every array and process.

    Raises:
        InputError: the rows cannot be split over the mesh.
    """
    sharding, parts = batch_sharding(mesh), row_share(mesh)[1]
    mine = row_shards(mesh) // parts
    for name, rows in batch.items():
        if np.ndim(rows) == 0 or len(rows) % mine:
            found = "a scalar" if np.ndim(rows) == 0 else f"{len(rows)} rows"
            raise InputError(
                f"{name}: {found} cannot be split over {mine} devices of this process "
                f"(data={mesh.shape[DATA]}, fsdp={mesh.shape[FSDP]}); make the batch a multiple"
            )
    return {
        name: jax.make_array_from_process_local_data(
            sharding, np.asarray(rows), (len(rows) * parts, *np.shape(rows)[1:])
        )
        for name, rows in batch.items()
    }


def put_rows(tree: Any, mesh: Mesh) -> Any:
    """Arrays whose first axis is rows, given whole by every process, on the mesh.

    Rows that cannot be split evenly are on every device; what is on the mesh already stays.
    """
    rows, everywhere = batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())

    def one(x):
        if mesh_of(x) is not None:
            return x
        split = np.ndim(x) > 0 and np.shape(x)[0] % row_shards(mesh) == 0
        return put(x, rows if split else everywhere)

    return jax.tree.map(one, tree)


def put_everywhere(tree: Any, mesh: Mesh) -> Any:
    """Arrays, the same in every process, whole on every device; what is on the mesh stays."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if mesh_of(x) is not None else put(x, everywhere), tree)


def put_tree(tree: Any, mesh: Mesh, shardings: Any = None) -> Any:
    """The leaves on the mesh, each process giving the whole array and keeping its shards.

    Args:
        shardings: a tree of the same structure; None: `tree_shardings`.
    """
    shardings = tree_shardings(tree, mesh) if shardings is None else shardings
    return jax.tree.map(put, tree, shardings)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """One array on the mesh; every process must hold the same values."""
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    # device_put would compare the array between all processes first.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that a model's parameters (or any arrays) lie on; None for a single device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)  # none of a numpy array
        # What a caller's jit traces has an abstract mesh, if any.
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None
