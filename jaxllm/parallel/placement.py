"""Placement of arrays on a mesh, with one or several processes, and lookup of an array's mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jaxllm.common.errors import InputError
from jaxllm.common.hardware import default_device
from jaxllm.parallel.sharding import DATA, FSDP, batch_sharding, row_shards, tree_shardings

T = TypeVar("T")


def row_share(mesh: Mesh) -> tuple[int, int]:
    """This process's part of the rows of a batch: (index of the part, number of parts).

    Processes that share a `tensor` axis hold the same rows, so they have the same part.

    Raises:
        InputError: the parts of two processes overlap without being equal.
    """
    devices_by_row = mesh.devices.reshape(row_shards(mesh), -1)
    process_rows: dict[int, list[int]] = {}
    for row, devices in enumerate(devices_by_row):
        for process in dict.fromkeys(device.process_index for device in devices):
            process_rows.setdefault(process, []).append(row)
    parts = sorted(set(map(tuple, process_rows.values())))
    if sum(map(len, parts)) != len(devices_by_row) or len(set(map(len, parts))) != 1:
        raise InputError(
            f"mesh: {dict(mesh.shape)} splits rows unevenly between {len(process_rows)} processes; "
            "let data * fsdp be a multiple of them, or tensor a multiple of the devices of each"
        )
    return parts.index(tuple(process_rows[jax.process_index()])), len(parts)


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Global sharded arrays from the rows that each process holds.

    Args:
        batch: this process's rows (`row_share`), the same number in every array and process.

    Raises:
        InputError: the rows do not divide over the mesh.
    """
    sharding, parts = batch_sharding(mesh), row_share(mesh)[1]
    shards = row_shards(mesh) // parts
    for name, rows in batch.items():
        if np.ndim(rows) == 0 or len(rows) % shards:
            found = "a scalar" if np.ndim(rows) == 0 else f"{len(rows)} rows"
            raise InputError(
                f"{name}: {found} cannot be split over {shards} devices of this process "
                f"(data={mesh.shape[DATA]}, fsdp={mesh.shape[FSDP]}); make the batch a multiple"
            )
    return {
        name: jax.make_array_from_process_local_data(
            sharding, np.asarray(rows), (len(rows) * parts, *np.shape(rows)[1:])
        )
        for name, rows in batch.items()
    }


def put_rows(tree: T, mesh: Mesh) -> T:
    """Shards arrays by their first axis, rows; every process passes the whole arrays.

    Rows that do not divide evenly are replicated; arrays already on a mesh are unchanged.
    """
    rows, replicated = batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())

    def one(x: Any):
        if mesh_of(x) is not None:
            return x
        split = np.ndim(x) > 0 and np.shape(x)[0] % row_shards(mesh) == 0
        return put(x, rows if split else replicated)

    return jax.tree.map(one, tree)


def put_everywhere(tree: T, mesh: Mesh) -> T:
    """Replicates arrays, equal in all processes; those already on a mesh are unchanged."""
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if mesh_of(x) is not None else put(x, replicated), tree)


def put_tree(tree: T, mesh: Mesh | AbstractMesh, shardings: object = None, *, path: str = "") -> T:
    """Shards the leaves over the mesh; every process passes whole arrays and keeps its shards.

    A model, or the state of a training run, keeps its card.

    Args:
        shardings: a tree of the same structure; None: `tree_shardings`.
        path: path of the tree in its model, for `tree_shardings`.
    """
    shardings = tree_shardings(tree, mesh, path) if shardings is None else shardings
    placed: Any = jax.tree.map(put, tree, shardings)
    card = getattr(tree, "card", None)
    return placed if card is None else placed.with_card(card)


def put(x: object, sharding: Sharding) -> Any:
    """Places one array with a sharding; every process must hold the same values.

    A shape (`jax.ShapeDtypeStruct`) gets the sharding, so that programs can be lowered for devices
    that this machine does not have.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=sharding)
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return wait_on_cpu_mesh(jax.device_put(x, sharding))
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    # device_put would compare the array between all processes first.
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def put_shapes(
    tree: Any, mesh: Mesh | AbstractMesh | None, device: Any, shardings: object = None
) -> Any:
    """The shapes of a tree of arrays or shapes, as `put_tree` shards them, or on one device."""
    if mesh is not None:
        return put_tree(shapes_of(tree), mesh, shardings)
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes_of(tree))


def shapes_of(tree: Any) -> Any:
    """The shapes and dtypes of arrays or shapes, without shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def wait_on_cpu_mesh(tree: T) -> T:
    """Waits for arrays that are on several CPU devices, and returns the tree.

    XLA queues 32 programs for each device of a CPU. While the next one waits to be queued, it takes
    the threads that collectives of the earlier programs need, and the process hangs. Code that
    starts a program for each of many arrays, or that may be called many times before a result is
    read, passes what it made through this function. Arrays of one device, and those of GPUs and
    TPUs, are returned at once.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            devices = leaf.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                return jax.block_until_ready(tree)
    return tree


def mesh_of(tree: object) -> Mesh | None:
    """The mesh of a model's parameters, or of any arrays; None on a single device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)  # numpy arrays have none
        # Traced arrays have an abstract mesh, or none.
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def device_of_arrays(tree: object) -> Any:
    """A device that holds a tree of arrays. JAX's default one if they are traced, or shapes without
    a sharding."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)  # None: numpy, or a shape
        if isinstance(sharding, Sharding) and not isinstance(leaf, Tracer):
            return next(iter(sharding.device_set))
    return default_device()


def platform_of_arrays(tree: object) -> str:
    """Platform of the devices that hold a tree of arrays: "cpu", "gpu" or "tpu"."""
    return device_of_arrays(tree).platform
