"""How many bytes a pool of slots takes, before anything is compiled, and how many slots fit."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import is_integer

SHARE_OF_DEVICE = 0.9
SHARE_OF_HOST = 0.5
"""Of the machine's memory, where the model computes on its processor."""
_IN_PLACE = (
    *("dynamic_update_slice", "scatter", "while", "reshape", "squeeze", "copy"),
    "sharding_constraint",
)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes of a pool, on each device."""

    weights: int
    cache: int
    """Of all slots: keys, values, texts and settings."""
    activations: int
    """What the programs need besides, at most: each intermediate array counts as if it were
    written out."""
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
        predict: of a number of slots; it traces programs, so it is asked few times.
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


def activations(jaxpr: Any) -> int:
    """Bytes of the intermediate arrays of a traced program that live at once, at most.

    Its arguments, and what is written into them in place, do not count.
    """
    return _peak(jaxpr.jaxpr)[0]


def _peak(jaxpr: Any) -> tuple[int, list[int]]:
    """Most bytes alive at once, and the bytes of each result."""
    last: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for variable in equation.invars:
            if not isinstance(variable, Literal):
                last[variable] = number
    last.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)})
    sizes: dict[Any, int] = {}
    alive = highest = 0
    for number, equation in enumerate(jaxpr.eqns):
        inner, results = _inside(equation)
        highest = max(highest, alive + max(inner, sum(results)))
        for variable, count in zip(equation.outvars, results, strict=True):
            if last.get(variable, -1) > number:
                sizes[variable] = count
                alive += count
        for variable in {v for v in equation.invars if not isinstance(v, Literal)}:
            if last[variable] == number:
                alive -= sizes.pop(variable, 0)
    return highest, [0 if isinstance(v, Literal) else sizes.get(v, 0) for v in jaxpr.outvars]


def _inside(equation: Any) -> tuple[int, list[int]]:
    """The peak inside one operation, and the bytes of its results."""
    name = equation.primitive.name
    bodies = [
        getattr(body, "jaxpr", body)
        for value in equation.params.values()
        for body in (value if isinstance(value, tuple | list) else (value,))
        if hasattr(getattr(body, "jaxpr", body), "eqns")
    ]
    results = [_bytes_of(v) for v in equation.outvars]
    if name.startswith(_IN_PLACE):
        results = [0] * len(results)
    if not bodies:
        return 0, results
    inner = [_peak(body) for body in bodies]
    if len(bodies) == 1 and len(inner[0][1]) == len(results) and name != "scan":
        results = inner[0][1] if name != "while" else results
    return max(peak for peak, _ in inner), results


def _bytes_of(variable: Any) -> int:
    aval = variable.aval
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else int(np.prod(aval.shape)) * dtype.itemsize
