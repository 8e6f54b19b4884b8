"""Random keys: one for each sample, derived only from the caller's key and the row's id.

A row therefore draws the same tokens in any batch, any bucket and on any device.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Key, UInt32

from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import is_traced, to_scalar
from jaxllm.models.input_checks import on_host

RandomKey: TypeAlias = Array | np.ndarray | int | None
"""A typed PRNG key, the data of a raw one, or an int seed; None: a fresh seed."""

RowIds: TypeAlias = Sequence[int] | np.ndarray | Array | None


def shared_key(key: RandomKey, mesh: Mesh | None) -> RandomKey:
    """The caller's key; None becomes a random seed shared by all processes of a mesh.

    Without a multi-process mesh None stays None.
    """
    if key is not None or mesh is None or not mesh.is_multi_process:
        return key
    return int(multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32))))


def row_keys(
    key: RandomKey, row_ids: RowIds, batch: int, samples: int, *, sampling: bool, under_jit: bool
) -> Key[Array, " Bn"] | UInt32[Array, "Bn 3"]:
    """Random keys for `samples` results of each row; the samples of a row are adjacent. Without
    sampling they are zeros on the host.

    Args:
        key: a PRNG key (typed or raw), an int seed, or None: a fresh seed at every call, since
            a constant would give the same sequence each time.
        row_ids: int [B]; None means 0..B-1.
        sampling: whether the keys will be used; greedy search needs none.
        under_jit: the call is being traced, and a fresh key would become a constant of the program.

    Raises:
        InputError: `key` is not a key or a seed of 32 bits, `row_ids` has another shape or values
            that are not uint32, or sampling inside jax.jit without a key.
    """
    row_ids = _checked_row_ids(row_ids, batch)
    seed: Any = to_scalar(key)
    if is_integer(seed) and not 0 <= seed < 2**32:  # JAX drops higher bits
        raise InputError(f"key: a seed is from 0 to 2**32 - 1, found {quoted(seed)}")
    if not (seed is None or is_integer(seed)):
        seed = _typed_key(seed)
    if not sampling:
        zeros: Any = np.zeros((batch * samples, 3), np.uint32)
        return zeros
    if seed is None:
        if under_jit:
            raise InputError("key: sampling inside jax.jit needs a key, as an argument")
        seed = secrets.randbits(32)
    return _random_keys(_typed_key(seed), row_ids, samples)


def _typed_key(key: Any) -> Key[Array, ""]:
    if is_integer(key) or (getattr(key, "ndim", 1) == 0 and jnp.issubdtype(key.dtype, jnp.integer)):
        key = jax.random.key(key)
    elif not hasattr(key, "dtype"):
        raise InputError(f"key: expected jax.random.key(...) or an int, found {quoted(key)}")
    elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            key = jax.random.wrap_key_data(key)
        except (TypeError, ValueError) as error:
            raise InputError(f"key: not the data of a PRNG key ({error})") from None
    if key.shape != ():
        raise InputError(f"key: expected one key, found {key.shape}; rows fold their ids into it")
    return key


def _checked_row_ids(row_ids: RowIds, batch: int) -> UInt32[Array, " B"]:
    host = on_host("row_ids", np.arange(batch) if row_ids is None else row_ids)
    if host.shape != (batch,):
        raise InputError(f"row_ids: expected shape {(batch,)}, found {host.shape}")
    if not is_traced(host):
        if host.dtype.kind not in "iu" or (host < 0).any() or (host >= 2**32).any():
            raise InputError(
                f"row_ids: expected integers from 0 to 2**32 - 1, found {quoted(row_ids)}"
            )
        return host.astype(np.uint32)
    return jnp.asarray(host, jnp.uint32)


@jax.jit(static_argnames=("samples",))
def _random_keys(
    key: Key[Array, ""], row_ids: UInt32[Array, " B"], samples: int
) -> Key[Array, " Bn"]:
    rows = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_ids)
    each = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), in_axes=(0, None))
    return each(rows, jnp.arange(samples, dtype=jnp.uint32)).reshape(-1)
