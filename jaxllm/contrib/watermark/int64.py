"""64-bit integers as pairs of uint32: exact arithmetic while JAX is in 32-bit mode.

Sums and products wrap modulo 2**64 (two's complement), as in torch's int64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

_LOW_HALF = np.uint32(0xFFFF)
_HALF = np.uint32(16)
_SIGN = np.uint32(0x80000000)


class Int64(NamedTuple):
    """Array of 64-bit integers, as high and low halves that broadcast like one array.

    >>> product = Int64.of_ints([2**40 + 5]).times(Int64.of_ints([3 - 2**63]))
    >>> product.hi.tolist(), product.lo.tolist()
    ([2147484416], [15])
    """

    hi: UInt32[Array, " ..."]
    lo: UInt32[Array, " ..."]

    @classmethod
    def of_ints(cls, values: Sequence[int] | int) -> Self:
        """Converts Python integers of any size and sign, modulo 2**64."""
        wrapped = np.array(np.array(values, object) % 2**64, np.uint64)
        return cls(
            (wrapped >> np.uint64(32)).astype(np.uint32),  # pyright: ignore[reportArgumentType]
            wrapped.astype(np.uint32),  # pyright: ignore[reportArgumentType]
        )

    @classmethod
    def of_tokens(cls, tokens: Array) -> Self:
        """Converts int32 values of at least 0."""
        lo = jnp.asarray(tokens).astype(jnp.uint32)
        return cls(jnp.zeros_like(lo), lo)

    def map(self, function: Callable[[Array], Array]) -> Int64:
        """Applies an indexing or reshaping function to both halves."""
        return Int64(function(self.hi), function(self.lo))

    def plus(self, other: Int64) -> Int64:
        lo = self.lo + other.lo
        carry = (lo < other.lo).astype(jnp.uint32)
        return Int64(self.hi + other.hi + carry, lo)

    def times(self, other: Int64) -> Int64:
        low = _product(self.lo, other.lo)
        return Int64(low.hi + self.hi * other.lo + self.lo * other.hi, low.lo)

    def equals(self, other: Int64) -> Bool[Array, " ..."]:
        return (self.hi == other.hi) & (self.lo == other.lo)

    def negative(self) -> Bool[Array, " ..."]:
        return self.hi >= _SIGN

    def less(self, other: Int64) -> Bool[Array, " ..."]:
        """Elementwise ``<``, signed."""
        a, b = self.hi ^ _SIGN, other.hi ^ _SIGN
        return (a < b) | ((a == b) & (self.lo < other.lo))

    def modulo(self, divisor: int) -> UInt32[Array, " ..."]:
        """The remainder from 0 to ``divisor - 1``, for a divisor of at most 2**24.

        The low half is processed byte by byte, so that no intermediate exceeds 32 bits.
        """
        if divisor & (divisor - 1) == 0:
            return self.lo & np.uint32(divisor - 1)
        size = np.uint32(divisor)
        rest = self.hi % size
        for shift in (24, 16, 8, 0):
            byte = (self.lo >> np.uint32(shift)) & np.uint32(0xFF)
            rest = (rest * np.uint32(256) + byte) % size
        # Read as unsigned, a negative number is 2**64 too large.
        excess = np.uint32(2**64 % divisor)
        return jnp.where(self.negative(), (rest + (size - excess)) % size, rest)


def _product(a: UInt32[Array, " ..."], b: UInt32[Array, " ..."]) -> Int64:
    """Full 64-bit product of two unsigned numbers."""
    a_hi, a_lo = a >> _HALF, a & _LOW_HALF
    b_hi, b_lo = b >> _HALF, b & _LOW_HALF
    middle = a_hi * b_lo + ((a_lo * b_lo) >> _HALF)
    other = a_lo * b_hi + (middle & _LOW_HALF)
    return Int64(a_hi * b_hi + (middle >> _HALF) + (other >> _HALF), a * b)


def smallest(values: Int64) -> Int64:
    """Least value along the last axis, compared as signed numbers."""
    best = values.map(lambda half: half[..., 0])
    for i in range(1, values.lo.shape[-1]):
        item = values.map(lambda half, i=i: half[..., i])
        less = item.less(best)
        best = jax.tree.map(lambda new, old, less=less: jnp.where(less, new, old), item, best)
    return best
