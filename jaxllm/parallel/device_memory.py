"""Memory of devices, and bytes of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import psutil


def own_memory(device: Any) -> int | None:
    """Bytes of a device's own memory; None if it shares the host's, or the backend does not say."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return psutil.virtual_memory().total


def total_memory(devices: Sequence[Any]) -> int:
    """Bytes of memory of all devices; those of a CPU share the host's."""
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
