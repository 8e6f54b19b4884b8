"""Meshes of devices with three axes, and the sharding of arrays over them.

The axes are `data`, `fsdp` and `tensor`. Every dimension of a parameter has a logical axis
(`vocab`, `embed`, ...), and every logical axis maps to an axis of the mesh. Parameters without a
rule (norms, counters, keys) are replicated. The rows of a batch are sharded over `data` and `fsdp`
together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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
            f"mesh: expected what jaxllm.make_mesh returns, with the axes {', '.join(AXES)}, all "
            f"of type Auto; found {quoted(mesh)}"
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


def use_mesh(mesh: Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """Context manager that sets the mesh for programs traced inside (`constrain`); None: no change.

    The mesh is part of the key of jax's compilation cache, so a function may run with and without.
    An abstract mesh, which has no devices, serves `jax.eval_shape`.

    Raises:
        InputError: as `context_mesh`, for the mesh that stays set with None.
    """
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    if mesh is None:
        context_mesh()
        return nullcontext()
    return jax.set_mesh(mesh)


def use_devices(mesh: Mesh | AbstractMesh | None, device: Any) -> AbstractContextManager[Any]:
    """Sets the mesh for programs traced inside, or without one what the device is: kernels of
    Pallas read the kind of GPU there, since JAX 0.11."""
    if mesh is not None:
        return use_mesh(mesh)
    kind = Mesh([device], ("device",)).abstract_mesh.abstract_device
    return use_mesh(AbstractMesh((), (), abstract_device=kind))


def abstract_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1) -> AbstractMesh:
    """The mesh of `make_mesh` without devices, which shardings of shapes can be made on."""
    return AbstractMesh((data, fsdp, tensor), AXES, (AxisType.Auto,) * len(AXES))


def context_mesh() -> AbstractMesh | None:
    """The mesh that `use_mesh` set; None if there is none.

    Raises:
        InputError: an axis of the mesh is of type Explicit, as `jax.make_mesh` makes them by
            default. JAX would then ask for a sharding in each operation of a model.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if AxisType.Explicit in mesh.axis_types:
        names = ", ".join(mesh.axis_names)
        raise InputError(
            f"mesh: the axes of jax.set_mesh ({names}) are of type Explicit; make the mesh with "
            "jaxllm.make_mesh, or give jax.make_mesh "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )
    return mesh if mesh.axis_names == AXES else None


def shard_map_is_checked() -> bool:
    """True inside a `jax.shard_map` that checks over which axes arrays vary. JAX's Pallas kernels
    do not say it of their results, even if nothing varies, so that they are errors there."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes and jax.typeof(jax.lax.axis_index(axes)).manual_axis_type.varying)


def heads_are_sharded() -> bool:
    """True if heads are sharded, and so need a separate axis in every array."""
    mesh = context_mesh()
    return mesh is not None and mesh.shape[TENSOR] > 1


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """Number of shards that the rows of a batch are split into, over all processes.

    Inside of `jax.shard_map` over rows it is 1: arrays there are shards of one device.
    """
    if mesh is None or DATA in manual_axes(mesh):
        return 1
    return mesh.shape[DATA] * mesh.shape[FSDP]


def manual_axes(mesh: Mesh | AbstractMesh) -> Collection[str]:
    """Axes of the `jax.shard_map` that is being traced."""
    return mesh.manual_axes if isinstance(mesh, AbstractMesh) else ()


T = TypeVar("T")

MESH_AXIS = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "mlp": TENSOR,
    "embed": FSDP,
    "experts": FSDP,
    "rank": FSDP,
    "copies": DATA,
}
"""Logical axis -> mesh axis. `tensor` shards a layer's computation: q, k and v followed by o, and
gate and up followed by down, need one all-reduce each (Megatron). `fsdp` shards the remaining
dimension, all-gathered before use, except that experts stay where they are. `rank` is the rank of a
LoRA update. `copies` are the rows of each copy of the model, not sharded further."""

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(embed|shared|lm_head)\.weight", ("vocab", "embed")),
    (r"lm_head\.bias", ("vocab",)),
    (r"positions\.weight", (None, "embed")),
    (r"project_in\.weight", ("embed", None)),
    (r"project_out\.weight", (None, "embed")),
    (r"final_logits_bias", (None, "vocab")),
    (r"position_bias\.\d+\.table\.weight", (None, "heads")),
    (r"(attn|cross)\.(q|k|v|qkv)\.weight", ("heads", "embed")),
    (r"(attn|cross)\.(q|k|v|qkv)\.bias", ("heads",)),
    (r"(attn|cross)\.o\.weight", ("embed", "heads")),
    (r"mlp\.(gate|up|gate_up)\.weight", ("mlp", "embed")),
    (r"mlp\.(gate|up|gate_up)\.bias", ("mlp",)),
    (r"mlp\.down\.weight", ("embed", "mlp")),
    (r"mlp\.router\.weight", (None, "embed")),
    (r"mlp\.expert_(gate|up)\.weight", ("experts", "mlp", None)),
    (r"mlp\.expert_down\.weight", ("experts", None, "mlp")),
    (r"score\.weight", (None, "embed")),
)
"""End of a parameter's path (regex) -> logical axes of its dimensions; weights are [out, in]."""

_RULES = [(re.compile(rf"(?:.*[./])?{pattern}"), axes) for pattern, axes in RULES]


def logical_axes(path: str) -> tuple[str | None, ...]:
    """Logical axes of a parameter; () if it is replicated.

    LoRA parameters take theirs from their layer's weight: ``lora_a`` [rank, in], ``lora_b`` [out,
    rank]. So do the parts of a quantized matrix: ``matrix.values`` [out, in], ``matrix.scale``
    [out], and in groups ``matrix.groups`` [group, out, size]. Those of experts have an axis of
    experts before the others.

    >>> logical_axes("backbone.stack.blocks.0.attn.o.weight")
    ('embed', 'heads')
    >>> logical_axes("backbone.stack.blocks.0.attn.o.lora_b")
    ('embed', None)
    >>> logical_axes("backbone.stack.blocks.0.attn.q.lora_b")
    ('heads', 'rank')
    """
    for part in _AXES_OF_PARTS:
        if path.endswith(part):
            return part_axes(part[1:], logical_axes(f"{path.removesuffix(part)}.weight"))
    return next((axes for rule, axes in _RULES if rule.fullmatch(path)), ())


def _rank_beside(axis: str | None) -> str | None:
    """Logical axis of the rank beside another axis: sharded over `fsdp` unless that axis is."""
    return None if axis == "embed" else "rank"


_AXES_OF_PARTS = {
    ".lora_a": lambda axes: (_rank_beside(axes[1]), axes[1]),
    ".lora_b": lambda axes: (axes[0], _rank_beside(axes[0])),
    ".lora_magnitude": lambda axes: axes[:1],
    ".matrix.values": lambda axes: axes,
    ".matrix.groups": lambda axes: (axes[1], axes[0], None),
    ".matrix.multipliers": lambda axes: (axes[1], axes[0]),
    ".matrix.scales": lambda axes: (axes[1], axes[0]),
    ".matrix.offsets": lambda axes: (axes[1], axes[0]),
    ".matrix.scale": lambda axes: axes[:1],
}
"""End of a path -> the axes, from those of the layer's weight."""


def parameter_sharding(path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Sharding of a parameter, or of an array whose path ends with a parameter's (Adam's moments).

    A dimension that its mesh axis does not divide is replicated over that axis, as GPT-2's
    vocabulary of 50257 over `tensor`. Arrays with an unknown path, or a rank other than the
    parameter's, are replicated.

    Args:
        path: ``"backbone.embed.weight"``, ``"0/mu/backbone.embed.weight"``.
        shape: shape of the array.
        mesh: a mesh from `make_mesh`.
    """
    axes = logical_axes(path)
    if len(axes) != len(shape):
        return NamedSharding(mesh, PartitionSpec())
    spec = [None if name is None else MESH_AXIS[name] for name in axes]
    # As XLA writes the shardings of what it returns: of others a training step would compile twice.
    spec = [
        None if axis is None or mesh.shape[axis] == 1 or size % mesh.shape[axis] else axis
        for axis, size in zip(spec, shape, strict=True)
    ]
    while spec and spec[-1] is None:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))


def tree_shardings(tree: object, mesh: Mesh | AbstractMesh, path: str = "") -> Any:
    """`parameter_sharding` of every leaf of a model, a dict of parameters or an optimizer state.

    Leaves need a shape only, so the output of `jax.eval_shape` works too. `path` is the path of the
    tree in a model, if it is a part of one.
    """
    prefix = f"{path}." if path else ""

    def leaf_sharding(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return parameter_sharding(prefix + parameter_path(key_path), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def parameter_path(key_path: tuple[Any, ...]) -> str:
    """A leaf's path with dots, as in `RULES`, without the final ``.value`` of nnx.

    For example ``backbone.stack.blocks.0.attn.q.weight``.
    """
    name = jax.tree_util.keystr(key_path, simple=True, separator=".")
    return name.removesuffix(".value")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays whose first axis is rows: over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def constrain(x: T, *axes: str | None, batch: int | None = None) -> T:
    """Constrains the sharding of an array: ``constrain(q, "rows", None, "heads", None)``.

    Does nothing without a mesh (`use_mesh`). "rows" stands for `data` and `fsdp` together. Axes
    that are omitted or None, and sizes that do not divide, are replicated.

    Args:
        batch: number of rows, if the first axis is rows and heads merged.
    """
    mesh = context_mesh()
    if mesh is None:
        return x

    def one(leaf: jax.Array):
        spec = partition_spec(leaf.shape, axes, mesh, batch)
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree.map(one, x)


def all_gather_fsdp(x: jax.Array, *axes: str | None) -> jax.Array:
    """All-gathers the fsdp shards of a parameter with these logical axes, before its use.

    The gradient is sharded as the parameter is: XLA then reduces it into shards. (The gradient of
    `constrain` has the sharding of its output, here whole on every device.)
    """
    return x if context_mesh() is None else _all_gather_fsdp(x, axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_gather_fsdp(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    return constrain(x, *(None if MESH_AXIS.get(axis or "") == FSDP else axis for axis in axes))


_all_gather_fsdp.defvjp(
    lambda x, axes: (_all_gather_fsdp(x, axes), None),
    lambda axes, _, gradient: (constrain(gradient, *axes),),
)


def constrain_gradient(x: jax.Array, *axes: str | None) -> jax.Array:
    """Returns x, whose gradient is constrained as `constrain` does."""
    return x if context_mesh() is None else _constrain_gradient(x, axes)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _constrain_gradient(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    return x


_constrain_gradient.defvjp(
    lambda x, axes: (x, None), lambda axes, _, gradient: (constrain(gradient, *axes),)
)


def partition_spec(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh: Mesh | AbstractMesh,
    batch: int | None = None,
) -> PartitionSpec:
    """Partition spec of an array with these logical axes; arguments as for `constrain`.

    Inside of `jax.shard_map` its axes are left out: arrays there are shards of one device.
    """
    manual = manual_axes(mesh)

    def place(size: int, name: str | None):
        if name == "rows":
            if DATA in manual:
                return None
            fits = (size if batch is None else batch) % row_shards(mesh) == 0
            return ROWS if fits else None
        axis = None if name is None else MESH_AXIS[name]
        return None if axis is None or axis in manual or size % mesh.shape[axis] else axis

    return PartitionSpec(*(place(size, name) for size, name in zip(shape, axes, strict=False)))


def fsdp_axis(shape: Sequence[int], axes: Sequence[str | None]) -> int | None:
    """The dimension of a parameter that is sharded over `fsdp`; None if there is none."""
    mesh = context_mesh()
    if mesh is None or mesh.shape[FSDP] == 1 or FSDP in mesh.manual_axes:
        return None
    if len(shape) != len(axes):
        return None
    found = (i for i, name in enumerate(axes) if MESH_AXIS.get(name or "") == FSDP)
    return next((i for i in found if shape[i] % mesh.shape[FSDP] == 0), None)


def part_axes(part: str, axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Logical axes of a part of a layer, such as ``lora_a``, from those of the layer's weight.

    >>> part_axes("matrix.groups", ("rows", "columns"))
    ('columns', 'rows', None)
    """
    return (*axes[:-2], *_AXES_OF_PARTS[f".{part}"](axes[-2:])) if len(axes) >= 2 else ()


def shard_count(shape: Sequence[int], *axes: str | None) -> int:
    """Number of shards of an array that `constrain(x, *axes)` makes; 1 without a mesh."""
    mesh = context_mesh()
    if mesh is None:
        return 1
    sharding = NamedSharding(mesh, partition_spec(shape, axes, mesh))
    return math.prod(shape) // math.prod(sharding.shard_shape(tuple(shape)))
