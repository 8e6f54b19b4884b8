"""How many bytes a pool of slots takes, by its compiled programs, and how many slots fit."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import is_integer

SHARE_OF_DEVICE = 0.9
SHARE_OF_HOST = 0.5
"""Of the machine's memory, where the model computes on its processor."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes of a pool of slots, on each device."""

    weights: int
    cache: int
    """All slots: keys, values, sequences and settings."""
    activations: int
    """What the compiled programs need besides; 0 where weights and cache alone do not fit."""
    budget: int
    slots: int
    """On all devices."""
    capacity: int
    devices: int = 1

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    def __str__(self) -> str:
        return (
            f"{self.slots} slots of {self.capacity} columns: weights {size(self.weights)}, cache "
            f"{size(self.cache)}, activations {size(self.activations)}, in all {size(self.total)} "
            f"of {size(self.budget)}" + (f" on each of {self.devices}" if self.devices > 1 else "")
        )


def size(count: int) -> str:
    """Bytes as people read them.

    >>> size(512), size(2_500_000), size(1_250_000_000)
    ('512 B', '2.5 MB', '1.2 GB')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def budget(memory: int | str | None, devices: int = 1) -> int:
    """The bytes that a batch may take on each device, weights included.

    Args:
        memory: a number, or a text such as "12GB". None: nine tenths of what the device has, or
            half of the machine's memory where the backend does not say.
        devices: of this machine that share its memory in that case.
    """
    if memory is None:
        stats = jax.local_devices()[0].memory_stats() or {}
        if "bytes_limit" in stats:
            return int(SHARE_OF_DEVICE * stats["bytes_limit"])
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(SHARE_OF_HOST * host) // devices
    if isinstance(memory, str):
        number = memory.strip().upper().removesuffix("B").removesuffix("I")
        unit = number[-1:] if number[-1:] in _UNITS else ""
        try:
            memory = int(float(number.removesuffix(unit)) * _UNITS[unit])
        except ValueError:
            memory = 0
    if not is_integer(memory) or memory < 1:
        raise InputError('memory: expected a number of bytes or a text such as "12GB"')
    return int(memory)


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree, or of their shapes; of each device's part on a mesh."""

    def one(x) -> int:
        sharding = getattr(x, "sharding", None)  # none of a numpy array
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * np.dtype(x.dtype).itemsize

    return sum(map(one, jax.tree.leaves(tree)))


def most_slots(predict: Callable[[int], Prediction], wanted: int, shards: int) -> Prediction:
    """The prediction for as many slots as fit, up to `wanted`; for the fewest if none do.

    Args:
        predict: of a number of slots; it may compile programs, so it is asked few times.
        shards: slots come in multiples of this.
    """
    slots = wanted
    while True:
        found = predict(slots)
        if found.fits or slots == shards:
            return found
        each = (found.total - found.weights) / slots
        # Activations do not shrink as fast as the slots: so at least by a little each time.
        fewer = min(int((found.budget - found.weights) / each), slots * 7 // 8)
        slots = max(1, fewer // shards) * shards


def working_memory(compiled: jax.stages.Compiled, state: int) -> int:
    """Bytes that a compiled program takes besides its weights and the state that it updates in
    place: intermediate arrays and other results, on each device.

    Args:
        state: bytes of the state.
    """
    memory = compiled.memory_analysis()
    if memory is None:  # a backend that does not say
        return 0
    return memory.temp_size_in_bytes + max(0, memory.output_size_in_bytes - state)
