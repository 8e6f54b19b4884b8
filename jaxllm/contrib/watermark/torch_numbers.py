"""torch's int64 arithmetic and CPU random numbers, so that other programs detect the watermarks.

JAX is in 32-bit mode: 64-bit integers are pairs of uint32 here. Their sums and products wrap modulo
2**64 (two's complement), as in torch.

torch's generator is the Mersenne Twister MT19937 with 32-bit outputs, seeded with the low 32 bits
of the seed. ``randint(0, 2)`` takes the lowest bit of each output; ``randperm`` is a Fisher-Yates
shuffle that swaps item i with item ``i + output % (size - i)``. (Checked with torch 2.13.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

_LOW_HALF = np.uint32(0xFFFF)
_HALF = np.uint32(16)
_SIGN = np.uint32(0x80000000)

_WORDS, _SHIFT = 624, 397
_UPPER, _LOWER = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_TWIST = np.uint32(0x9908B0DF)


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


def random_bits(seed: int, size: int) -> np.ndarray:
    """``torch.randint(0, 2, (size,))`` with a generator of this seed, uint8 ``[size]``."""
    return (_outputs_on_host(seed, size) & 1).astype(np.uint8)


def permutation(seed: int, size: int) -> np.ndarray:
    """``torch.randperm(size)`` with a generator of this seed, int32 ``[size]``."""
    i = np.arange(size)
    j = i + _outputs_on_host(seed, size) % (size - i)
    # Item i becomes the value at index j just before its swap: the one that the last earlier swap
    # with index j put there, or j itself.
    order = np.argsort(j, kind="stable")
    earlier = np.full(size, -1)
    repeated = j[order][1:] == j[order][:-1]
    earlier[order[1:][repeated]] = order[:-1][repeated]
    swapped = j != i
    last = i.copy()
    last[j[swapped]] = i[swapped]
    return np.where(earlier < 0, j, _ends_on_host(last)[earlier]).astype(np.int32)


def first_of_permutation(seed: UInt32[Array, ""], size: int, count: int) -> Bool[Array, " V"]:
    """Mask of the numbers among the first ``count`` of ``torch.randperm(size)``, in parallel.

    The swaps of the shuffle depend on each other: index i may have been changed by an earlier swap,
    and that one by a still earlier swap. Pointer doubling follows each chain to its end, so the
    depth is logarithmic.

    Args:
        seed: the low 32 bits of the generator's seed.
        size, count: Python numbers, ``0 <= count < size``.
    """
    if count == 0:
        return jnp.zeros((size,), bool)
    outputs = _outputs(seed, count)
    i = jnp.arange(count, dtype=jnp.uint32)
    j = i + outputs % (np.uint32(size) - i)
    places = jnp.arange(size, dtype=jnp.int32)
    # The last swap that changed each index before its own swap; the index itself means none.
    target = jnp.where(j == i, np.uint32(size), j)
    last = jnp.full((size,), -1, jnp.int32).at[target].max(i.astype(jnp.int32), mode="drop")
    last = jnp.where(last < 0, places, last)
    ends = _ends(last[:count])
    behind = last[count:]  # values at indices >= `count` after all swaps
    behind = jnp.where(behind < count, ends[jnp.minimum(behind, count - 1)], behind)
    return jnp.ones((size,), bool).at[behind].set(False)


def _ends(parent: Int[Array, " n"]) -> Int[Array, " n"]:
    def unfinished(state: tuple[Array, Array]) -> Bool[Array, ""]:
        return (state[0] != state[1]).any()

    def double(state: tuple[Array, Array]) -> tuple[Array, Array]:
        return state[1], state[1][state[1]]

    return lax.while_loop(unfinished, double, (parent, parent[parent]))[1]


def _ends_on_host(parent: np.ndarray) -> np.ndarray:
    while not np.array_equal(parent, following := parent[parent]):
        parent = following
    return parent


def _outputs_on_host(seed: int, count: int) -> np.ndarray:
    # NumPy's RandomState is frozen and seeds the same generator in the same way.
    generator = np.random.RandomState(seed % 2**32)
    return generator.randint(0, 2**32, count, dtype=np.uint32).astype(np.int64)


def _outputs(seed: UInt32[Array, ""], count: int) -> UInt32[Array, " count"]:
    """First ``count`` outputs of MT19937 (Matsumoto and Nishimura 1998)."""

    def seeding(word: Array, index: Array) -> tuple[Array, Array]:
        word = np.uint32(1812433253) * (word ^ (word >> np.uint32(30))) + index
        return word, word

    def block(state: Array, _: None) -> tuple[Array, Array]:
        state = _next_state(state)
        return state, _tempered(state)

    index = jnp.arange(1, _WORDS, dtype=jnp.uint32)
    _, rest = lax.scan(seeding, seed, index, unroll=16)
    state = jnp.concatenate([seed[None], rest])
    _, blocks = lax.scan(block, state, None, length=math.ceil(count / _WORDS))
    return blocks.reshape(-1)[:count]


def _next_state(state: UInt32[Array, " n"]) -> UInt32[Array, " n"]:
    """Next state: word k depends on words k, k + 1, k + 397 (mod 624; updated after wrapping)."""

    def mixed(first: Array, second: Array) -> Array:
        word = (first & _UPPER) | (second & _LOWER)
        return (word >> np.uint32(1)) ^ jnp.where(word & np.uint32(1) == 1, _TWIST, np.uint32(0))

    mix = mixed(state[:-1], state[1:])
    ahead = _WORDS - _SHIFT
    first = state[_SHIFT:] ^ mix[:ahead]
    second = first ^ mix[ahead : 2 * ahead]
    third = second[: _WORDS - 1 - 2 * ahead] ^ mix[2 * ahead :]
    wrapped = second[_SHIFT - 1 - ahead] ^ mixed(state[-1], first[0])
    return jnp.concatenate([first, second, third, wrapped[None]])


def _tempered(word: UInt32[Array, " n"]) -> UInt32[Array, " n"]:
    word ^= word >> np.uint32(11)
    word ^= (word << np.uint32(7)) & np.uint32(0x9D2C5680)
    word ^= (word << np.uint32(15)) & np.uint32(0xEFC60000)
    return word ^ (word >> np.uint32(18))


first_of_permutations = jax.vmap(first_of_permutation, in_axes=(0, None, None))
