"""Predicts the memory of a pool of slots from its compiled programs, and how many slots fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jaxllm.common.errors import InputError
from jaxllm.common.hardware import format_bytes, host_memory, own_memory
from jaxllm.generation.inputs.values import is_integer

SHARE_OF_DEVICE = 0.9
SHARE_OF_HOST = 0.5
"""Share of the machine's memory, where the model computes on its processor."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted bytes of a pool of slots, per device."""

    weights: int
    cache: int
    """State of all slots: KV cache, sequences and settings."""
    activations: int
    """Working memory of the compiled programs; 0 if the weights alone do not fit."""
    budget: int
    slots: int
    """Number of slots on all devices together."""
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
            f"{self.slots} sequence{'s' * (self.slots != 1)} at a time, up to {self.capacity} "
            f"tokens each: weights {format_bytes(self.weights)}, KV cache "
            f"{format_bytes(self.cache)}, activations {format_bytes(self.activations)}, together "
            f"{format_bytes(self.total)} of {format_bytes(self.budget)}"
            + (f" on each of {self.devices} devices" if self.devices > 1 else "")
        )


def memory_budget(memory: int | str | None, devices: int = 1) -> int:
    """Bytes that a batch may use on each device, weights included.

    Args:
        memory: a number, or a string such as "12GB". None: nine tenths of what the device has, or
            half of the machine's memory where the backend does not say.
        devices: number of devices that share this machine's memory in that case.
    """
    if memory is None:
        own = own_memory(jax.local_devices()[0])
        if own is not None:
            return int(SHARE_OF_DEVICE * own)
        return int(SHARE_OF_HOST * host_memory()) // devices
    if isinstance(memory, str):
        number = memory.strip().upper().removesuffix("B").removesuffix("I")
        unit = number[-1:] if number[-1:] in _UNITS else ""
        try:
            memory = int(float(number.removesuffix(unit)) * _UNITS[unit])
        except (ValueError, OverflowError):
            memory = 0
    if not is_integer(memory) or memory < 1:
        raise InputError('memory: expected a number of bytes or a string such as "12GB"')
    return int(memory)


def fitting_slots(predict: Callable[[int], Prediction], slots: int, shards: int) -> Prediction:
    """The prediction for as many slots as fit, up to `slots`; for the fewest if none do.

    Args:
        predict: maps a number of slots to its prediction. It may compile, so it is called rarely.
        shards: the number of slots is a multiple of this.
    """
    while True:
        prediction = predict(slots)
        if prediction.fits or slots == shards:
            return prediction
        per_slot = (prediction.total - prediction.weights) / slots
        fewer_slots = int((prediction.budget - prediction.weights) / per_slot)
        # Activations shrink less than the number of slots: reduce it by an eighth at least.
        fewer_slots = min(fewer_slots, slots * 7 // 8)
        slots = max(1, fewer_slots // shards) * shards


def working_memory(compiled: jax.stages.Compiled, state: int) -> int:
    """Bytes per device that a compiled program needs beyond weights and donated state: temporary
    arrays and other outputs.

    Args:
        state: bytes of the state.
    """
    memory = compiled.memory_analysis()
    if memory is None:  # a backend that does not report it
        return 0
    return memory.temp_size_in_bytes + max(0, memory.output_size_in_bytes - state)
