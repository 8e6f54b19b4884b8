"""Where arrays lie on many devices: one mesh of three axes, and one table for all families.

Every dimension of a parameter has a name that says what it counts (`vocab`, `embed`, ...), and
every name goes to an axis of the mesh. What the table does not know (norms, counters, keys) is
whole on every device. Rows of a batch go over `data` and `fsdp` together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.common.errors import InputError

T = TypeVar("T")

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
ROWS = (DATA, FSDP)
"""The axes of the mesh that the rows of a batch are split over."""

MESH_AXIS = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "mlp": TENSOR,
    "embed": FSDP,
}
"""Logical axis -> axis of the mesh. `tensor` splits what a layer computes, so that two products in
a row need one sum over devices; `fsdp` splits what is left, which a layer gathers before use."""

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(embed|shared|lm_head)\.weight", ("vocab", "embed")),
    (r"positions\.weight", (None, "embed")),
    (r"position_bias\.\d+\.table\.weight", (None, "heads")),
    (r"(attn|cross)\.[qkv]\.weight", ("heads", "embed")),
    (r"(attn|cross)\.[qkv]\.bias", ("heads",)),
    (r"(attn|cross)\.o\.weight", ("embed", "heads")),
    (r"mlp\.(gate|up)\.weight", ("mlp", "embed")),
    (r"mlp\.(gate|up)\.bias", ("mlp",)),
    (r"mlp\.down\.weight", ("embed", "mlp")),
    (r"score\.weight", (None, "embed")),
)
"""How a parameter's path ends -> the logical axes of its dimensions, which are [out, in]."""

_RULES = [(re.compile(rf"(?:.*[./])?{pattern}"), axes) for pattern, axes in RULES]


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor`.

    Args:
        data: copies of the model, each for other rows of the batch.
        fsdp: devices that share each copy's weights, and its rows.
        tensor: devices that share the work on each row; it must divide the model's heads.
        devices: all of all processes by default. One of the three sizes may be -1: what is left.

    Raises:
        InputError: the sizes do not multiply to the number of devices.

    >>> dict(make_mesh(devices=jax.devices()[:1]).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {DATA: data, FSDP: fsdp, TENSOR: tensor}
    said = ", ".join(f"{name}={size}" for name, size in sizes.items())
    open_axes = [name for name, size in sizes.items() if size == -1]
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise InputError(f"mesh: {name}: expected an integer of 1 or more, or -1, found {size}")
    if len(open_axes) > 1:
        raise InputError(f"mesh: {said}: only one axis can be -1 (what is left)")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes and len(devices) % fixed == 0:
        sizes[open_axes[0]] = len(devices) // fixed
    elif open_axes:
        raise InputError(
            f"mesh: {said}: {len(devices)} devices cannot be divided by {fixed}; change one of the "
            "two"
        )
    elif fixed != len(devices):
        raise InputError(
            f"mesh: {said} makes {fixed} devices, but there are {len(devices)}; set one axis to -1 "
            "(what is left), or name the devices"
        )
    # Auto: the compiler carries shardings through the models, whose code knows nothing of a mesh.
    automatic = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes.values()), AXES, automatic, devices=devices)


def check_mesh(mesh: Any) -> None:
    """Raises InputError where it is not a mesh as `make_mesh` makes them."""
    ours = isinstance(mesh, Mesh) and mesh.axis_names == AXES
    if not ours or any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise InputError(
            f"mesh: expected what jaxllm.make_mesh returns, with the automatic axes "
            f"{', '.join(AXES)}; found {mesh!r}"
        )


def logical_axes(path: str) -> tuple[str | None, ...]:
    """The logical axes of a parameter, () for what is whole everywhere.

    A LoRA leaf has those of the weight beside it: ``lora_a`` [rank, in], ``lora_b`` [out, rank].

    >>> logical_axes("backbone.stack.blocks.0.attn.o.weight")
    ('embed', 'heads')
    >>> logical_axes("backbone.stack.blocks.0.attn.o.lora_b")
    ('embed', None)
    """
    stem, _, leaf = path.rpartition(".")
    if leaf in _OF_WEIGHT:
        axes = logical_axes(f"{stem}.weight")
        return _OF_WEIGHT[leaf](axes) if len(axes) == 2 else ()
    return next((axes for rule, axes in _RULES if rule.fullmatch(path)), ())


_OF_WEIGHT = {
    "lora_a": lambda axes: (None, axes[1]),
    "lora_b": lambda axes: (axes[0], None),
    "lora_magnitude": lambda axes: axes[:1],
}


def parameter_sharding(path: str, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Where a parameter lies, or any array whose path ends with a parameter's (Adam's moments).

    A dimension that its axis of the mesh does not divide is whole on that axis: GPT-2's vocabulary
    of 50257 is on every device. Unknown paths, and arrays of another rank than the parameter, are
    whole everywhere.

    Args:
        path: ``"backbone.embed.weight"``, ``"0/mu/backbone.embed.weight"``.
        shape: of the array.
        mesh: as of `make_mesh`.
    """
    axes = logical_axes(path)
    if len(axes) != len(shape):
        return NamedSharding(mesh, PartitionSpec())
    spec = [
        None if name is None or size % mesh.shape[MESH_AXIS[name]] else MESH_AXIS[name]
        for name, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """`parameter_sharding` of every leaf of a model, of parameters by path, of optimizer states.

    Leaves need a shape only, so those of `jax.eval_shape` do.
    """

    def of(key_path, leaf) -> NamedSharding:
        return parameter_sharding(key_name(key_path), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(of, tree)


def key_name(key_path: tuple) -> str:
    """A leaf's path with the separators of `RULES`, without nnx's own last step to the value."""
    name = jax.tree_util.keystr(key_path, simple=True, separator=".")
    return name.removesuffix(".value")


def check_heads(heads: Mapping[str, int], mesh: Mesh) -> None:
    """Heads are not cut: `tensor` must divide them all.

    Args:
        heads: by the field of config.json that says how many there are.

    Raises:
        InputError: names the field, the two numbers, and what would do.
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


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays whose first axis is rows: over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def use(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """Programs traced inside know the mesh (`constrain`); None changes nothing.

    Part of the key of jax's compiled programs, so one function may run with a mesh and without.
    """
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def context_mesh() -> AbstractMesh | None:
    """The mesh of `use`, while a program is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.axis_names != AXES else mesh


def heads_apart() -> bool:
    """Whether heads are split over devices, and so need an axis of their own in every array."""
    mesh = context_mesh()
    return mesh is not None and mesh.shape[TENSOR] > 1


def constrain(x: T, *axes: str | None, batch: int | None = None) -> T:
    """Says how an array is split: ``constrain(q, "rows", None, "heads", None)``.

    Without a mesh around it (`use`) this does nothing at all. Axes that are left out, and sizes
    that do not divide, are whole on every device.

    Args:
        batch: rows, where the first axis is rows and heads together.
    """
    mesh = context_mesh()
    if mesh is None:
        return x

    def one(leaf):
        spec = partition(leaf.shape, axes, mesh, batch)
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree.map(one, x)


def partition(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh: Mesh | AbstractMesh,
    batch: int | None = None,
) -> PartitionSpec:
    """How an array whose axes have these names is split; `constrain` says what they mean."""

    def place(size: int, name: str | None):
        if name == "rows":
            fits = (size if batch is None else batch) % row_shards(mesh) == 0
            return ROWS if fits else None
        axis = None if name is None else MESH_AXIS[name]
        return None if axis is None or size % mesh.shape[axis] else axis

    return PartitionSpec(*(place(size, name) for size, name in zip(shape, axes, strict=False)))


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """The number of parts that the rows of a batch are cut into, over all processes."""
    return 1 if mesh is None else mesh.shape[DATA] * mesh.shape[FSDP]
