"""The arrays of a pool of slots, and a copy of the first few rows while no other slot is busy."""

from __future__ import annotations

from functools import partial

import jax
from jaxtyping import Array

from jaxllm.batch.slots import Slots

MIN_SLOTS = 8
"""Slots below which a copy of a quarter of them would save little."""


def few_slots(slots: int, platform: str) -> int | None:
    """Number of first slots that are decoded alone while the others are free; None: all always are.

    >>> few_slots(16, "cpu"), few_slots(4, "cpu"), few_slots(128, "tpu")
    (4, None, None)
    """
    # PERF(cpu): a decode step of 16 rows takes twice as long as one of 4; benchmarks/README.md. On
    # an accelerator both take the time in which the weights are read.
    return slots // 4 if platform == "cpu" and slots >= MIN_SLOTS else None


@partial(jax.jit, static_argnames="count")
def first_rows(slots: Slots, *, count: int) -> Slots:
    """A copy of the first `count` slots."""

    def rows(x: Array) -> Array:
        return x[: x.shape[0] // slots.count * count]

    return jax.tree.map(rows, slots)


@partial(jax.jit, donate_argnames="slots")
def with_first_rows(slots: Slots, first: Slots) -> Slots:
    """The slots with other first rows, which are written in place."""

    def write(x: Array, rows: Array) -> Array:
        return jax.lax.dynamic_update_slice(x, rows, (0,) * x.ndim)

    return jax.tree.map(write, slots, first)


class SlotArrays:
    """The arrays of all slots, of which only the first few are decoded while no others are busy.

    Args:
        slots: all of them.
        few: how many; None: all are always decoded.
    """

    def __init__(self, slots: Slots, few: int | None) -> None:
        self._all, self._few = slots, few
        self._first: Slots | None = None
        """Stands for the first rows of `_all` while it is not None."""

    @property
    def current(self) -> Slots:
        """All slots, or the first few if these were decoded last: every busy one is in them."""
        return self._all if self._first is None else self._first

    def all(self) -> Slots:
        """All slots."""
        if self._first is not None:
            self._all, self._first = with_first_rows(self._all, self._first), None
        return self._all

    def first(self, count: int) -> Slots:
        """The first few slots if `count` are no more, else all."""
        if self._few is None or count > self._few:
            return self.all()
        if self._first is None:
            self._first = first_rows(self._all, count=self._few)
        return self.current

    def replace(self, slots: Slots) -> None:
        """Replaces what was returned last, `current`."""
        if self._first is None:
            self._all = slots
        else:
            self._first = slots
