"""The devices that programs are compiled for, although this machine does not have them.

XLA compiles ahead of time for the devices of a topology description: TPU with the package libtpu,
GPU with JAX's CUDA plugin. Such devices make meshes and shardings, but hold no arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import operator
import os
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.backend import backends
from jax.sharding import Mesh

from jaxllm.common.arguments import checked
from jaxllm.common.compiling import without_compile_cache
from jaxllm.common.errors import InputError, MissingExtraError, UnsupportedError
from jaxllm.common.optional_packages import install_command
from jaxllm.common.precision import chosen_precision
from jaxllm.models.expert_use import used_shares
from jaxllm.models.model import Model
from jaxllm.parallel.placement import mesh_of
from jaxllm.parallel.sharding import DATA, use_devices, use_mesh
from jaxllm.planning.abstract import device_bytes, is_used, read_shares, with_experts

GIB = 2**30
KNOWN = (
    "v5e:2x4, v6e:2x2, v5p:2x2x1 and the like (TPU); h100 or h100:8, and without a compiler a100, "
    "a100-40gb, l4, h200 and b200 (GPU); cpu"
)
# The description that XLA's GPU compiler takes in place of a device.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device, with the figures of its vendor."""

    name: str
    platform: str
    """Name of the platform that JAX lowers for: "tpu", "cuda" or "cpu"."""
    memory_bytes: int | None
    """Memory that a program may use; None: unknown."""
    bandwidth: float | None
    """Bytes per second between the memory and the chip."""
    clock: float | None = None
    """Cycles per second of the compiler's estimates; None: the compiler estimates none."""
    flops: float | None = None
    """Peak bfloat16 operations per second."""
    float32_flops: float | None = None
    """Peak operations per second of exact float32 products."""
    link: float | None = None
    """Bytes per second that a device sends to others in a collective operation."""
    hop: float = 0.0
    """Seconds from one device of a ring to the next; collectives of few bytes take as long as their
    hops."""

    def peak(self, dtype: Any) -> float:
        """Operations per second of products in a dtype; infinity if unknown.

        Products of float32 are exact unless `jax.default_matmul_precision` is set.
        """
        is_exact = np.dtype(dtype) == np.float32 and chosen_precision() in (None, "highest")
        return (self.float32_flops if is_exact else self.flops) or math.inf

    def ring_seconds(self, sent: float, hops: int) -> float:
        """Time of a collective operation in which a device sends bytes, or time of its hops."""
        return 0.0 if self.link is None else max(sent / self.link, hops * self.hop)

    def all_reduce_seconds(self, size: float, devices: int) -> float:
        """Time of an all-reduce of `size` bytes, around half of a ring in each direction."""
        return self.ring_seconds(2 * size * (devices - 1) / devices, 2 * (devices // 2))


def _tpu_chip(
    name: str, gib: float, bandwidth: float, clock: float, flops: float, link: float
) -> Chip:
    float32 = flops / 6
    memory = int(gib * GIB)
    return Chip(name, "tpu", memory, bandwidth, clock, flops, float32, link, hop=1e-6)


def _gpu_chip(
    name: str, memory: float, bandwidth: float, flops: float, float32: float, link: float
) -> Chip:
    return Chip(name, "cuda", int(memory), bandwidth, None, flops, float32, link)


# cloud.google.com/tpu/docs (v5e, v6e, v5p); of their memory, XLA gives a program what is stated
# here. Rings of a TPU's chips, in both directions, and the time of a hop: Austin et al. 2025, How
# to Scale Your Model, chapter 2. float32 takes six products of bfloat16 there. GPUs: NVIDIA's data
# sheets, dense, without TF32; NVLink in one direction (L4: PCIe 4.0 x16), and the whole memory,
# except for H100, whose driver reports the number here.
CHIPS = {
    "v5e": _tpu_chip("TPU v5e", 15.75, 819e9, 1.5e9, 197e12, 90e9),
    "v6e": _tpu_chip("TPU v6e", 31.25, 1640e9, 1.75e9, 918e12, 180e9),
    "v5p": _tpu_chip("TPU v5p", 95.74, 2765e9, 1.75e9, 459e12, 180e9),
    "a100": _gpu_chip("A100 80GB", 80e9, 2039e9, 312e12, 19.5e12, 300e9),
    "a100-40gb": _gpu_chip("A100 40GB", 40e9, 1555e9, 312e12, 19.5e12, 300e9),
    "l4": _gpu_chip("L4", 24e9, 300e9, 121e12, 30.3e12, 32e9),
    "h100": _gpu_chip("H100 80GB", 84942979072, 3352e9, 989e12, 67e12, 450e9),
    "h200": _gpu_chip("H200", 141e9, 4800e9, 989e12, 67e12, 450e9),
    "b200": _gpu_chip("B200", 180e9, 8000e9, 2250e12, 75e12, 900e9),
    "cpu": Chip("CPU", "cpu", None, None),
}
COMPILED_GPU = "h100"
"""The GPU whose description for the compiler is known here."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind, in the order in which meshes take them."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]


def chip_and_count(name: str) -> tuple[Chip, int]:
    """The kind of device of a topology, and how many there are. Needs no compiler.

    Raises:
        UnsupportedError: no such kind of device, or sizes of another form.

    >>> chip, count = chip_and_count("v5e:2x4")
    >>> chip.name, count
    ('TPU v5e', 8)
    >>> chip_and_count("l4")[1], chip_and_count("h200:4")[1]
    (1, 4)
    """
    kind, _, sizes = checked(name, (str,), "topology", "a name").partition(":")
    if kind not in CHIPS:
        raise UnsupportedError(f"topology: unknown {name!r}; known: {KNOWN}")
    chip = CHIPS[kind]
    if chip.platform == "cpu":
        if sizes:
            raise UnsupportedError(
                f"topology: {name!r}: a CPU has as many devices as "
                "XLA_FLAGS=--xla_force_host_platform_device_count=N says; use cpu alone"
            )
        return chip, len(jax.devices("cpu"))
    if chip.platform == "tpu":
        if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", sizes):
            raise UnsupportedError(
                f"topology: {name!r}: expected the sizes of a slice, such as v5e:2x4"
            )
        return chip, math.prod(map(int, sizes.split("x")))
    if not re.fullmatch(r"([1-9]\d{0,3})?", sizes):
        raise UnsupportedError(f"topology: {name!r}: expected {kind} or a number of them, {kind}:8")
    return chip, int(sizes or 1)


def find_topology(name: str) -> Topology:
    """The devices of a topology.

    Args:
        name: ``"v5e:2x4"``, ``"v5e:1x1"`` (also v6e, and v5p with three sizes), ``"h100"``,
            ``"h100:8"``, or ``"cpu"``: the devices of this machine's CPU and its own compiler.

    Raises:
        UnsupportedError: no such kind of device, none that programs are compiled for, or sizes that
            the compiler does not know.
        MissingExtraError: the compiler is not installed.
        InputError: the compiler cannot be started.

    >>> find_topology("cpu").chip.platform
    'cpu'
    """
    chip, count = chip_and_count(name)
    if chip.platform == "cpu":
        devices: Any = jax.devices("cpu")
    elif chip.platform == "tpu":
        _check_installed("libtpu", "plan-tpu", "libtpu")
        # No metadata server and no other hosts are asked.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # libtpu warns without
        one_chip = {"chips_per_host_bounds": [1, 1, 1]} if count == 1 else {}  # libtpu's are 2x2x1
        devices = _described(name, "tpu", topology_name=name, **one_chip)
    elif chip is CHIPS[COMPILED_GPU]:
        _check_installed("jax_plugins.xla_cuda12", "plan-gpu", "jax-cuda12-plugin")
        options = {"target_config": H100, "topology": f"1x1x{count}"}
        devices = _described(name, "cuda", topology_name="", **options)
    else:
        raise UnsupportedError(
            f"topology: {name!r}: jaxllm compiles no programs for {chip.name}, and knows bounds "
            f"only; call decide() or `jaxllm plan --bounds`, or compile for {COMPILED_GPU}"
        )
    return Topology(name, chip, tuple(devices))


def has_compiler(name: str) -> bool:
    """True if this machine can compile programs for a topology."""
    chip, _ = chip_and_count(name)
    if chip.platform == "cpu":
        return True
    if chip.platform == "tpu":
        return _is_installed("libtpu")
    return chip is CHIPS[COMPILED_GPU] and _is_installed("jax_plugins.xla_cuda12")


def _described(name: str, platform: str, **options: Any) -> Any:
    try:
        return topologies.get_topology_desc(platform=platform, **options).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if "INVALID_ARGUMENT" in reason:
            raise UnsupportedError(f"topology: {name!r}: {reason}") from None
        if "lockfile" in reason:
            raise InputError(
                f"topology: {name!r}: libtpu serves one process at a time, and another one has "
                "/tmp/libtpu_lockfile; wait until it ends"
            ) from None
        raise InputError(f"topology: {name!r}: its compiler cannot be started: {reason}") from None


def _check_installed(module: str, extra: str, package: str) -> None:
    if not _is_installed(module):
        raise MissingExtraError(
            f"compiling for this topology needs the package {package}: {install_command(extra)}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


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
    beside_bytes: int = 0
    """Other arrays that stay on the device while the program runs."""
    rows: int = 0
    """Sequences of a step, on all devices."""
    tokens: int = 0
    """Tokens of a step, on all devices."""
    flops: float = 0.0
    """FLOPs of a step on all devices."""
    dtype: Any = "bfloat16"
    """Dtype of the products."""
    model_flops: float | None = None
    """Model FLOPs of a training step on all devices (`jaxllm.training.monitor.flops`), of whose
    attention the causal half is counted."""
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
    """Shapes with shardings, an argument of the compiled programs, and the model's card."""
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
        return Target(placed.with_card(model.checked_card("lower")), mesh, device)

    def lowered(
        self,
        name: str,
        traced: jax.stages.Traced,
        position: int = 0,
        *,
        tokens: int,
        **numbers: Any,
    ) -> LoweredProgram:
        """The program, lowered for the platform of the devices.

        Args:
            position: index of the first leaf of the model among the leaves of the arguments.
            tokens: tokens of a step, on all devices, which choose the experts that are read.
        """
        weights = jax.tree.leaves(self.model)
        jaxpr = traced.jaxpr.jaxpr
        variables = jaxpr.invars[position : position + len(weights)]
        arguments = [x for x, var in zip(weights, variables, strict=True) if is_used(jaxpr, var)]
        # The tokens of a copy of the model go to all of its experts.
        used = used_shares(self.model, tokens / (self.mesh.shape[DATA] if self.mesh else 1))
        shares = with_experts(read_shares(jaxpr, variables), used.values())
        with use_devices(self.mesh, self.device):
            lowered = traced.lower(lowering_platforms=(platform_of(self.device),))
        return LoweredProgram(
            name=name,
            lowered=lowered,
            weight_bytes=device_bytes(weights),
            argument_weight_bytes=device_bytes(arguments),
            read_weight_bytes=round(sum(map(operator.mul, map(device_bytes, weights), shares))),
            tokens=tokens,
            dtype=self.model.dtype,
            mesh=self.mesh,
            ahead_of_time=self.device.client not in backends().values(),
            **numbers,
        )


def platform_of(device: Any) -> str:
    """The platform that JAX lowers for: "cuda" where a device says "gpu"."""
    return "cuda" if device.platform == "gpu" else device.platform
