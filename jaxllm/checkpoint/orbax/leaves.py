"""Flattens pytrees to named arrays, independent of their classes and nesting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.common.errors import CheckpointError, listed


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

    Raises:
        CheckpointError: two leaves have the same path.
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


FOUR_BITS = (jnp.dtype(jnp.int4), jnp.dtype(jnp.uint4))


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bits_of(leaf: jax.Array) -> jax.Array:
    """The array itself, the key data of typed PRNG keys, or pairs of 4 bits as int8."""
    if leaf.dtype in FOUR_BITS:
        return jax.lax.bitcast_convert_type(leaf.reshape(*leaf.shape[:-1], -1, 2), jnp.int8)
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def bits_like(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of `bits_of` for a leaf of a target; unsharded: the first device.

    Key data has more axes than the keys; these are not sharded.
    """
    bits = jax.eval_shape(bits_of, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)


def from_bits(bits: jax.Array, leaf: Any) -> jax.Array:
    """The inverse of `bits_of` for a leaf of a target."""
    if leaf.dtype in FOUR_BITS:
        return jax.lax.bitcast_convert_type(bits, leaf.dtype).reshape(leaf.shape)
    return jax.random.wrap_key_data(bits, dtype=leaf.dtype) if is_key(leaf) else bits
