"""Checks of a call's arrays on the host, before anything is traced: indexing under jit clamps in silence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.errors import InputError


def is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def token_ids(name: str, ids: Any, vocab_size: int) -> Int[Array, "B T"]:
    """Ids as int32, checked in the width they came in (int64 2**40 + 5 would become 5)."""
    if not is_traced(ids):
        host = np.asarray(ids)
        if host.ndim != 2 or host.size == 0:
            raise InputError(f"{name}: expected a non-empty [batch, length], found {host.shape}")
        if host.dtype.kind not in "iu":
            raise InputError(f"{name}: expected integers, found {host.dtype}")
        bad = (host < 0) | (host >= vocab_size)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise InputError(
                f"{name}[{row}, {column}]: id {host[row, column]} is not in the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
    return jnp.asarray(ids, jnp.int32)


def mask_of(name: str, mask: Any, shape: tuple[int, ...]) -> Bool[Array, "B T"]:
    """An attention mask (1 = real token) as booleans; None means that every token is real."""
    if mask is None:
        return jnp.ones(shape, bool)
    if not is_traced(mask):
        host = np.asarray(mask)
        if host.shape != shape:
            raise InputError(f"{name}: expected shape {shape}, found {host.shape}")
        if not np.isin(host, (0, 1)).all():
            raise InputError(f"{name}: expected 0 and 1 only")
    elif mask.shape != shape:
        raise InputError(f"{name}: expected shape {shape}, found {mask.shape}")
    return jnp.asarray(mask).astype(bool)


def one_of(ids: Any, embeds: Any, name: str = "input_ids", other: str = "inputs_embeds") -> None:
    if (ids is None) == (embeds is None):
        raise InputError(f"{name}, {other}: give exactly one of the two")


def check_label_ids(labels: Any, vocab_size: int) -> Int[Array, "B T"]:
    """Labels: ids or -100 (not counted)."""
    if not is_traced(labels):
        host = np.asarray(labels)
        bad = (host != -100) & ((host < 0) | (host >= vocab_size))
        if host.dtype.kind not in "iu" or bad.any():
            found = host[bad][0] if host.dtype.kind in "iu" else host.dtype
            raise InputError(f"labels: expected ids 0 to {vocab_size - 1} or -100, found {found}")
    return jnp.asarray(labels, jnp.int32)
