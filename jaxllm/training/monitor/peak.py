"""Peak FLOP/s of the devices: from data sheets, or measured where none is known."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import time
import uuid
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float64

# Dense bfloat16 (V100, T4: float16) FLOP/s of one JAX device, from the vendors' data sheets, by a
# part of its device_kind; the first match counts. A TPU v2 or v3 device is one of two cores.
PEAK_FLOPS = (
    ("B200", 2.25e15),
    ("H200 NVL", 8.35e14),
    ("H200", 9.89e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.89e14),
    ("A100", 3.12e14),
    ("A10G", 7.0e13),
    ("A10", 1.25e14),
    ("L40S", 3.62e14),
    ("L4", 1.21e14),
    ("V100", 1.25e14),
    ("T4", 6.5e13),
    ("RTX 4090", 1.65e14),
    ("RTX 3090", 7.1e13),
    ("TPU v6", 9.18e14),
    ("TPU v5 lite", 1.97e14),
    ("TPU v5e", 1.97e14),
    ("TPU v5p", 4.59e14),
    ("TPU v5", 4.59e14),
    ("TPU v4", 2.75e14),
    ("TPU v3", 6.15e13),
    ("TPU v2", 2.25e13),
)


# Size and dtype of the matrix products that are measured.
ACCELERATOR_PRODUCT = (8192, "bfloat16")
CPU_PRODUCT = (1024, "float32")


@dataclasses.dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of all devices together, and the source of the number."""

    flops: float
    source: str

    def __str__(self) -> str:
        """
        >>> print(Peak(9.89e14, "data sheet"))
        9.89e+14 FLOP/s (data sheet)
        """
        return f"{self.flops:.3g} FLOP/s ({self.source})"


def peak_flops(devices: Sequence[Any] | None = None) -> Peak:
    """Peak FLOP/s of the devices, of all processes by default; every process calls it.

    Accelerators are looked up by `device_kind`, regardless of the model's dtype. Of other devices
    the fastest of a few matrix products is measured: on a CPU in float32, by the time of the
    processor, so that other programs that use it do not count (about 0.1 s); on an accelerator in
    bfloat16. Virtual devices of a CPU share one processor, as do the processes of one machine.
    """
    devices = jax.devices() if devices is None else devices
    own = (device for device in devices if device.process_index == jax.process_index())
    first = next(own)
    if first.platform != "cpu":
        per_device = known_peak(first.device_kind)
        if per_device is not None:
            source = f"data sheet: {first.device_kind} x {len(devices)}, dense 16-bit"
            return Peak(per_device * len(devices), source)
        return Peak(_measured_accelerator(first) * len(devices), _source(first, len(devices)))
    peaks, machines = _of_processes(_measured_cpu(first)), _of_processes(_machine_number())
    by_machine = dict(zip(machines.tolist(), peaks.tolist(), strict=True))
    return Peak(sum(by_machine.values()), _source(first, len(by_machine)))


def _source(device: Any, count: int) -> str:
    is_cpu = device.platform == "cpu"
    size, dtype = CPU_PRODUCT if is_cpu else ACCELERATOR_PRODUCT
    name = "machine" if is_cpu else device.device_kind
    return f"measured: {dtype} product of {size} x {size}, {name} x {count}"


def _of_processes(value: float) -> Float64[np.ndarray, " P"]:
    """The values of all processes, in their order."""
    if jax.process_count() == 1:
        return np.array([value], np.float64)
    # As bytes, since JAX would convert a float64 to float32.
    sent = np.frombuffer(np.float64(value).tobytes(), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(sent), np.uint8)
    return np.frombuffer(gathered.tobytes(), np.float64)


def _machine_number() -> float:
    """A number that the processes of one machine have in common."""
    digest = hashlib.sha256(f"{platform.node()} {uuid.getnode()}".encode()).digest()
    return float(int.from_bytes(digest[:6]))


def known_peak(device_kind: str) -> float | None:
    """Looks up the peak FLOP/s of a device by its name; None if unknown.

    >>> known_peak("NVIDIA H100 80GB HBM3"), known_peak("abacus")
    (989000000000000.0, None)
    """
    words = f" {device_kind} ".replace("-", " ")
    return next((peak for name, peak in PEAK_FLOPS if f" {name} " in words), None)


def _measured_accelerator(device: Any) -> float:
    """FLOP/s of one device: the best of three runs of ten products in a row."""
    size, dtype = ACCELERATOR_PRODUCT
    count = 10
    x = jax.device_put(np.eye(size, dtype=np.float32), device).astype(dtype)
    products = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda _, y: y @ x, x))
    products(x).block_until_ready()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        products(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 * count / best


def _measured_cpu(device: Any) -> float:
    """FLOP/s of all cores that this process may use."""
    size, dtype = CPU_PRODUCT
    x = jax.device_put(np.full((size, size), 0.5, dtype), device)
    product = jax.jit(jnp.dot)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        product(x, x).block_until_ready()
        best = min(best, time.process_time() - start)
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return 2.0 * size**3 / best * cores
