"""The devices that programs are lowered for, and a program that is lowered for them."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from typing import Any

import jax
from jax.extend.backend import backends
from jax.sharding import Mesh

from jaxllm.common.compiling import without_compile_cache
from jaxllm.models.model import Model
from jaxllm.parallel.mesh import use_mesh
from jaxllm.parallel.placement import mesh_of, put_everywhere
from jaxllm.planning.abstract import device_bytes, on_device, shapes_of
from jaxllm.planning.weight_reads import is_used, read_shares


@dataclasses.dataclass(frozen=True)
class LoweredProgram:
    """A program of the library, lowered and not yet compiled. Bytes are those of one device."""

    name: str
    """`decode`, `prefill`, `batch.decode`, `batch.prefill` or `train`."""
    lowered: jax.stages.Lowered
    loops: int
    """How many loops a step is the body of: 0 if it is the whole program, 2 if it is inside a loop
    of a fixed number of steps."""
    weight_bytes: int
    """The model's parameters."""
    argument_weight_bytes: int
    """The parameters among the arguments of the compiled program."""
    read_weight_bytes: int
    """What the program reads of them: of an embedding that is not the head as well the rows of its
    tokens alone, and in a decode step of T5 no encoder (`read_shares`)."""
    cache_bytes: int = 0
    """The KV cache; 0 for a training step."""
    cache_arrays: frozenset[tuple[str, int]] = frozenset()
    """Dtype and number of elements of the arrays of keys and values."""
    mesh: Mesh | None = None
    """The mesh of the model; None: a single device."""
    ahead_of_time: bool = False
    """True if this machine does not have the devices."""

    def compile(self) -> jax.stages.Compiled:
        """Compiles the program for the devices of the model.

        JAX's persistent compilation cache is used for the devices of this machine only.
        """
        uncached = without_compile_cache() if self.ahead_of_time else contextlib.nullcontext()
        with use_mesh(self.mesh), uncached:
            return self.lowered.compile()


@dataclasses.dataclass(frozen=True)
class Target:
    """A model and the devices that programs are lowered for."""

    model: Any
    """Shapes with shardings: an argument of the compiled programs."""
    unplaced: Any
    """Shapes without shardings, with the model's card, which the host reads."""
    mesh: Mesh | None
    device: Any
    """The device, or the mesh's first one."""

    @staticmethod
    def of(model: Model[Any]) -> Target:
        mesh, leaf = mesh_of(model), jax.tree.leaves(model)[0]
        device = min(leaf.sharding.device_set, key=lambda device: device.id)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model
        )
        unplaced = jax.tree.map(lambda x: x.update(sharding=None), placed)
        return Target(placed, unplaced.with_card(model.checked_card("lower")), mesh, device)

    def everywhere(self, tree: Any) -> Any:
        """Shapes of arrays that every device holds whole."""
        tree = shapes_of(tree)
        return (
            on_device(tree, self.device) if self.mesh is None else put_everywhere(tree, self.mesh)
        )

    def lowered(
        self, name: str, traced: jax.stages.Traced, position: int = 0, **numbers: Any
    ) -> LoweredProgram:
        """The program, lowered for the platform of the devices.

        Args:
            position: index of the first leaf of the model among the leaves of the arguments.
        """
        weights = jax.tree.leaves(self.model)
        jaxpr = traced.jaxpr.jaxpr
        variables = jaxpr.invars[position : position + len(weights)]
        arguments = [x for x, var in zip(weights, variables, strict=True) if is_used(jaxpr, var)]
        shares = read_shares(jaxpr, variables)
        with use_mesh(self.mesh):
            lowered = traced.lower(lowering_platforms=(platform_of(self.device),))
        return LoweredProgram(
            name=name,
            lowered=lowered,
            weight_bytes=device_bytes(weights),
            argument_weight_bytes=device_bytes(arguments),
            read_weight_bytes=round(sum(map(operator.mul, map(device_bytes, weights), shares))),
            mesh=self.mesh,
            ahead_of_time=self.device.client not in backends().values(),
            **numbers,
        )


def platform_of(device: Any) -> str:
    """The platform that JAX lowers for: "cuda" where a device says "gpu"."""
    return "cuda" if device.platform == "gpu" else device.platform
