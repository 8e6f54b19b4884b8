"""What a machine has and what JAX uses of it; memory of devices, and bytes of arrays."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.common.optional_packages import install_command

ROOT = Path("/")
GOOGLE_VENDOR = "0x1ae0"
"""PCI vendor of TPUs."""
SHARE_OF_DEVICE = 0.9
"""Share of a device's own memory that a batch may use, weights included."""
SHARE_OF_HOST = 0.5
"""The same of the machine's memory, where the model computes on its processor."""
KERNELS_GAIN = (
    "they decode 1.1 to 1.8 times as many tokens/s in float32; `make kernels` in a clone, or "
    + install_command("cpu")
)
CURES = {
    "gpu": f"this machine has an NVIDIA GPU that JAX does not see: {install_command('cuda12')}, "
    "and look at `nvidia-smi`",
    "tpu": f"this machine has a TPU that JAX does not see: {install_command('tpu')}, and check "
    "that no other process uses it",
}


def accelerators(root: Path = ROOT) -> set[str]:
    """Kinds of accelerators that the operating system has: ``"gpu"`` for NVIDIA's, ``"tpu"``.

    Args:
        root: root of the file system.
    """
    found: set[str] = set()
    if any((root / "dev").glob("nvidia[0-9]*")) or any(
        (root / "proc/driver/nvidia/gpus").glob("*")
    ):
        found.add("gpu")
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    if any((root / "dev").glob("accel[0-9]*")) or any(_is_google(path) for path in vendors):
        found.add("tpu")
    return found


def _is_google(vendor: Path) -> bool:
    try:
        return vendor.read_text().strip() == GOOGLE_VENDOR
    except OSError:
        return False


def unseen_accelerators(root: Path = ROOT) -> list[str]:
    """What to do about each accelerator that JAX does not see and that nobody switched off."""
    if os.environ.get("JAX_PLATFORMS"):
        return []
    return [CURES[kind] for kind in sorted(accelerators(root) - {jax.default_backend()})]


def cpu_kernels() -> Literal["used", "off", "missing"]:
    """Whether the package jaxllm_cpu_kernels computes on a CPU, is switched off, or is missing."""
    if os.environ.get("JAXLLM_CPU_KERNELS") == "0":
        return "off"
    return "missing" if find_spec("jaxllm_cpu_kernels") is None else "used"


def describe_devices() -> str:
    """JAX's devices in one line, such as ``4 x NVIDIA H100`` or ``CPU with 8 cores``."""
    kinds = Counter(device.device_kind for device in jax.devices())
    if jax.default_backend() != "cpu":
        return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    count = jax.device_count()
    cores = f"CPU with {os.cpu_count()} cores"
    kernels = ", CPU kernels" if cpu_kernels() == "used" else ""
    return (f"{count} virtual devices of a {cores}" if count > 1 else cores) + kernels


def device_report(root: Path = ROOT) -> list[str]:
    """What a command says of its devices at the start: one line, and what could be better."""
    lines = [f"devices: {describe_devices()}", *unseen_accelerators(root)]
    if jax.default_backend() == "cpu" and cpu_kernels() == "missing":
        lines.append(f"the CPU kernels are not installed: {KERNELS_GAIN}")
    return lines


def cpu_name() -> str:
    """The processor's name, or the machine's architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def default_device() -> Any:  # a jax.Device, whose type pyright cannot find
    """The device of this process on which JAX places arrays without a sharding."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device


def own_memory(device: Any) -> int | None:
    """Bytes of a device's own memory; None if it shares the host's, or the backend does not say."""
    try:
        stats = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a device that is not there, for which programs compile
        return None
    return stats.get("bytes_limit")


def own_capability() -> float | None:
    """The smallest compute capability of this process's GPUs; None if there is no NVIDIA GPU."""
    found = [str(getattr(x, "compute_capability", "")) for x in jax.local_devices()]
    numbers = [float(x) for x in found if x.replace(".", "", 1).isdigit()]
    return min(numbers, default=None)


def host_memory() -> int:
    """Bytes of memory of this machine."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    import psutil  # for Windows

    return psutil.virtual_memory().total


def usable_memory(devices: int) -> int:
    """Bytes that a batch may use on each device.

    Args:
        devices: number of devices that share the host's memory, if they have none of their own.
    """
    own = own_memory(default_device())
    shared = int(SHARE_OF_HOST * host_memory()) // devices
    return shared if own is None else int(SHARE_OF_DEVICE * own)


def total_memory(devices: Sequence[Any]) -> int:
    """Bytes of memory of all devices. The devices of a CPU share the host's memory."""
    sizes = [own_memory(device) for device in devices]
    shares_host = None in sizes
    return sum(filter(None, sizes)) + (host_memory() if shares_host else 0)


def nbytes(tree: object) -> int:
    """Bytes per device of a pytree of arrays or shapes; sharded arrays count as their shard."""

    def leaf_bytes(x: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> int:
        sharding = getattr(x, "sharding", None)  # numpy arrays have none
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(leaf_bytes, jax.tree.leaves(tree)))


def format_bytes(count: int) -> str:
    """Formats a number of bytes.

    >>> format_bytes(512), format_bytes(2_500_000), format_bytes(1_250_000_000)
    ('512 B', '2.5 MB', '1.2 GB')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
