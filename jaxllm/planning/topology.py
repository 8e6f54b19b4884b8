"""Accelerators that programs are compiled for although this machine does not have them.

XLA compiles ahead of time for the devices of a topology description: TPU with the package libtpu,
GPU with JAX's CUDA plugin. Such devices make meshes and shardings, but hold no arrays.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from jaxllm.common.arguments import checked
from jaxllm.common.errors import InputError, MissingExtraError, UnsupportedError

GIB = 2**30


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


# cloud.google.com/tpu/docs (v5e, v6e, v5p); of their memory, XLA gives a program what is stated
# here. H100 SXM: NVIDIA's data sheet.
CHIPS = {
    "v5e": Chip("TPU v5e", "tpu", int(15.75 * GIB), 819e9, 1.5e9, 197e12),
    "v6e": Chip("TPU v6e", "tpu", int(31.25 * GIB), 1640e9, 1.75e9, 918e12),
    "v5p": Chip("TPU v5p", "tpu", int(95.74 * GIB), 2765e9, 1.75e9, 459e12),
    "h100": Chip("H100 80GB", "cuda", 84942979072, 3352e9, None, 989e12),
    "cpu": Chip("CPU", "cpu", None, None),
}

KNOWN = "v5e:2x4, v6e:2x2, v5p:2x2x1 and the like (TPU), h100 or h100:8 (GPU), cpu"

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
class Topology:
    """Devices of one kind, in the order in which meshes take them."""

    name: str
    chip: Chip
    devices: tuple[Any, ...]


def find_topology(name: str) -> Topology:
    """The devices of a topology.

    Args:
        name: ``"v5e:2x4"`` (also v6e, and v5p with three sizes), ``"h100"``, ``"h100:8"``, or
            ``"cpu"``: the devices of this machine's CPU and its own compiler.

    Raises:
        UnsupportedError: no such kind of device, or sizes that the compiler does not know.
        MissingExtraError: the compiler is not installed.
        InputError: the compiler cannot be started.

    >>> find_topology("cpu").chip.platform
    'cpu'
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
        return Topology(name, chip, tuple(jax.devices("cpu")))
    devices = _tpu(name, sizes) if chip.platform == "tpu" else _gpu(name, sizes)
    return Topology(name, chip, tuple(devices))


def _tpu(name: str, sizes: str) -> Any:
    if not re.fullmatch(r"\d+(x\d+){1,2}", sizes):
        raise UnsupportedError(
            f"topology: {name!r}: expected the sizes of a slice, such as v5e:2x4"
        )
    _check_installed("libtpu", "plan-tpu", "libtpu")
    # No metadata server and no other hosts are asked.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # libtpu warns where it is unset
    return _described(name, "tpu", topology_name=name)


def _gpu(name: str, sizes: str) -> Any:
    if not re.fullmatch(r"\d*", sizes) or sizes == "0":
        raise UnsupportedError(f"topology: {name!r}: expected h100 or a number of them, h100:8")
    _check_installed("jax_plugins.xla_cuda12", "plan-gpu", "jax-cuda12-plugin")
    count = int(sizes or 1)
    return _described(name, "cuda", topology_name="", target_config=H100, topology=f"1x1x{count}")


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
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingExtraError(
            f"compiling for this topology needs the package {package}: "
            f"pip install 'jaxllm[{extra}]'"
        )
