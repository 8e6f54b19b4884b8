"""Pytrees as named arrays with a digest each.

Names do not depend on the classes and the nesting of a tree, digests not on the sharding.

Every element is hashed with its index in the array, in two ways, and each of the two hashes is
summed modulo 2^32. Sums do not depend on order, so digests do not depend on sharding, mesh or
number of processes; XLA computes them on the shards and all-reduces two words per device.

The hash is a bijection of the element (the finaliser of MurmurHash3, Appleby 2011), so a change of
one element always changes the digest; other changes are missed with a probability of about 2^-64.
It is not a cryptographic hash.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxllm.common.errors import CheckpointError, listed
from jaxllm.common.hardware import default_device
from jaxllm.parallel.placement import wait_on_cpu_mesh

FOUR_BITS = (jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4))
# 2^64 divided by the golden ratio: its multiples spread evenly over the words.
GOLDEN = 0x9E3779B97F4A7C15
WORD_SIZE = 2**32
ZERO = np.uint32(0)
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint: dtype name, shape, digest of its bits."""

    dtype: str
    shape: tuple[int, ...]
    digest: str

    def __str__(self) -> str:
        return dtype_and_shape(self)


def dtype_and_shape(leaf: Any) -> str:
    """Dtype and shape as text, such as ``float32[2, 3]``."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def flatten(tree: object) -> dict[str, Any]:
    """The leaves of a pytree by path, in order: ``opt_state/0/mu/embed.weight``.

    Fields of dataclasses and named tuples, keys and indices are written alike.

    >>> flatten({"params": {"w": 1}, "opt_state": (2, [3])})
    {'opt_state/0': 2, 'opt_state/1/0': 3, 'params/w': 1}
    """
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise CheckpointError(f"two arrays have the path {name!r}")
        named[name] = leaf
    return named


def check_arrays(leaves: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless all leaves are JAX arrays."""
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise CheckpointError(f"{name}: expected a jax.Array, found {type(leaf).__name__}")


def check_target(where: str, found: Mapping[str, Leaf], target: Mapping[str, Any]) -> None:
    """Raises CheckpointError if names, shapes or dtypes differ from the target's."""
    missing = [name for name in target if name not in found]
    unexpected = [name for name in found if name not in target]
    if missing or unexpected:
        raise CheckpointError(
            f"{where}: the arrays do not fit"
            + (f"; missing: {listed(missing)}" if missing else "")
            + (f"; unexpected: {listed(unexpected)}" if unexpected else "")
        )
    for name, leaf in target.items():
        if (str(leaf.dtype), tuple(leaf.shape)) != (found[name].dtype, found[name].shape):
            raise CheckpointError(
                f"{where}: {name} is {found[name]}, but {dtype_and_shape(leaf)} is expected"
            )


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bits_of(leaf: jax.Array) -> jax.Array:
    """The array itself, the key data of typed PRNG keys, or pairs of 4 bits as int8."""
    if leaf.dtype in FOUR_BITS:
        pairs = leaf.reshape(*leaf.shape[:-1], -1, 2)
        return wait_on_cpu_mesh(jax.lax.bitcast_convert_type(pairs, jnp.int8))
    return wait_on_cpu_mesh(jax.random.key_data(leaf)) if is_key(leaf) else leaf


def bits_like(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of `bits_of` for a leaf of a target; unsharded: the default
    device.

    Key data has more axes than the keys; these are not sharded.
    """
    bits = jax.eval_shape(bits_of, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(default_device())
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)


def from_bits(bits: jax.Array, leaf: Any) -> jax.Array:
    """The inverse of `bits_of` for a leaf of a target."""
    if leaf.dtype in FOUR_BITS:
        pairs = jax.lax.bitcast_convert_type(bits, leaf.dtype)
        return wait_on_cpu_mesh(pairs.reshape(leaf.shape))
    return jax.random.wrap_key_data(bits, dtype=leaf.dtype) if is_key(leaf) else bits


def digests(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """Digest of each array as 16 hexadecimal digits.

    Computed on the devices that hold the arrays. With several processes, every process must call
    this with the same names in the same order.

    >>> a = jnp.arange(6.0).reshape(2, 3)
    >>> digests({"a": a, "b": a.at[1, 2].add(1e-6), "c": a})
    {'a': '99da54f8c592a093', 'b': '8ba3444734296f96', 'c': '99da54f8c592a093'}
    """
    words = {name: wait_on_cpu_mesh(digest(array)) for name, array in arrays.items()}
    host_words = jax.device_get(words)
    return {name: f"{int(high):08x}{int(low):08x}" for name, (high, low) in host_words.items()}


@jax.jit
def digest(x: Array) -> UInt32[Array, " 2"]:
    """The two words of an array's digest, which depends on its bits only, not on its dtype.

    Raises:
        CheckpointError: an element is not of 1, 2, 4 or 8 bytes of plain bits (complex, int4).
    """
    words = as_words(x)
    strides = [math.prod(words.shape[d + 1 :]) for d in range(words.ndim)]
    axes = [jax.lax.broadcasted_iota(jnp.uint32, words.shape, d) for d in range(words.ndim)]

    def place(factors: list[int]) -> Array:
        zero = jnp.zeros(words.shape, jnp.uint32)
        return sum((a * jnp.uint32(f) for a, f in zip(axes, factors, strict=True)), zero)

    # Multiples of the flat index: `near` repeats after 2^32 elements, `far` does not.
    near = place([stride * GOLDEN % WORD_SIZE for stride in strides])
    far = place([stride * GOLDEN % 2**64 // WORD_SIZE for stride in strides])
    high = murmur(words ^ near, 0x85EBCA6B, 0xC2B2AE35)
    low = murmur(words + far, 0xCC9E2D51, 0x1B873593)
    # PERF(cpu): one reduction of two operands is several times faster than two reductions.
    return jnp.stack(jax.lax.reduce((high, low), (ZERO, ZERO), add, tuple(range(words.ndim))))


def add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    return a[0] + b[0], a[1] + b[1]


def as_words(x: Array) -> UInt32[Array, " ..."]:
    """The bits of each element as one word, or two along a new last axis for 8 bytes."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    plain = jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating)
    bits = 0
    if plain:
        info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
        bits = info(x.dtype).bits
    if bits % 8 or bits // 8 not in UNSIGNED:
        raise CheckpointError(f"arrays of {x.dtype} cannot be saved in a checkpoint")
    return jax.lax.bitcast_convert_type(x, UNSIGNED[bits // 8]).astype(jnp.uint32)


def murmur(words: Array, first: int, second: int) -> Array:
    """A bijection of 32-bit words in which every bit of the result depends on every bit."""
    words = (words ^ (words >> 16)) * jnp.uint32(first)
    words = (words ^ (words >> 13)) * jnp.uint32(second)
    return words ^ (words >> 16)
