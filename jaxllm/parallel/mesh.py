"""Meshes of devices with three axes: `data`, `fsdp` and `tensor`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxllm.common.arguments import checked_list
from jaxllm.common.errors import InputError, quoted

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
ROWS = (DATA, FSDP)
"""Mesh axes that shard the rows of a batch."""


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,  # of jax.Device, whose type pyright cannot find
) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor`.

    Args:
        data: number of copies of the model, each for different rows of the batch. One of the three
            sizes may be -1: the devices that are left.
        fsdp: number of devices that each copy's weights, and its rows, are sharded over.
        tensor: number of devices that share the work on each row; it must divide the model's heads.
        devices: by default all devices of all processes.

    Raises:
        InputError: the sizes do not multiply to the number of devices.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    devices = jax.devices() if devices is None else checked_list(devices, "devices")
    if not devices or not all(hasattr(device, "device_kind") for device in devices):
        raise InputError(f"devices: expected devices of JAX, found {quoted(devices)}")
    sizes = {DATA: data, FSDP: fsdp, TENSOR: tensor}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise InputError(
                f"mesh: {name}: expected an integer of 1 or more, or -1, found {quoted(size)}"
            )
    shape = ", ".join(f"{name}={quoted(size)}" for name, size in sizes.items())
    unknown_axes = [name for name, size in sizes.items() if size == -1]
    if len(unknown_axes) > 1:
        raise InputError(f"mesh: {shape}: only one axis can be -1 (what is left)")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if unknown_axes and len(devices) % fixed == 0:
        sizes[unknown_axes[0]] = len(devices) // fixed
    elif unknown_axes:
        raise InputError(
            f"mesh: {shape}: {len(devices)} devices cannot be divided by {quoted(fixed)}; "
            "change one of the two"
        )
    elif fixed != len(devices):
        raise InputError(
            f"mesh: {shape} makes {quoted(fixed)} devices, but there are {len(devices)}; set one "
            "axis to -1 (what is left), or name the devices"
        )
    # Auto: the compiler propagates shardings; the models only add constraints (`constrain`).
    automatic = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, automatic, devices=devices)


def check_mesh(mesh: Any) -> None:
    """Raises InputError unless `mesh` has the axes and axis types of `make_mesh`."""
    has_axes = isinstance(mesh, Mesh) and mesh.axis_names == AXES
    if not has_axes or any(axis_type != AxisType.Auto for axis_type in mesh.axis_types):
        raise InputError(
            f"mesh: expected what jaxllm.make_mesh returns, with the automatic axes "
            f"{', '.join(AXES)}; found {quoted(mesh)}"
        )


def check_heads(heads: Mapping[str, int], mesh: Mesh) -> None:
    """Checks that `tensor` divides every number of heads, since a head is never split.

    Args:
        heads: number of heads by the config.json field that gives it.

    Raises:
        InputError: names the field, the two numbers and the sizes that fit.
    """
    size = mesh.shape[TENSOR]
    for field, count in heads.items():
        if count % size:
            common = math.gcd(*heads.values())
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise InputError(
                f"mesh: tensor={size} does not divide {field}, {count}; for this model it can be "
                + ", ".join(map(str, fitting))
            )


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Context manager that sets the mesh for programs traced inside (`constrain`); None: no change.

    The mesh is part of the key of jax's compilation cache, so a function may run with and without.
    """
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def context_mesh() -> AbstractMesh | None:
    """The mesh that `use_mesh` set; None if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.axis_names != AXES else mesh


def heads_are_sharded() -> bool:
    """True if heads are sharded, and so need a separate axis in every array."""
    mesh = context_mesh()
    return mesh is not None and mesh.shape[TENSOR] > 1


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Number of shards that the rows of a batch are split into, over all processes."""
    return 1 if mesh is None else mesh.shape[DATA] * mesh.shape[FSDP]
