"""Dropout as a pure function: applied with a key (training), skipped with None (inference)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.common.errors import InputError, quoted
from jaxllm.nn.platform import random_uint16

LEVELS = 1 << 16


def dropout(x: Float[Array, ...], rate: float, key: Array | None) -> Float[Array, ...]:
    """Inverted dropout (Srivastava et al. 2014): zeroes elements with probability `rate`, scales
    the rest. `rate` is rounded to a multiple of 1/65536, and the scale matches the rounded rate."""
    dropped = round(rate * LEVELS)
    if key is None or dropped == 0:
        return x
    if dropped == LEVELS:
        return jnp.zeros_like(x)
    kept = jnp.where(dropout_mask(key, dropped, x.shape), x * (LEVELS / (LEVELS - dropped)), 0)
    return kept.astype(x.dtype)


def dropout_mask(key: Array, dropped: int, shape: tuple[int, ...]) -> Bool[Array, ...]:
    """Dropout mask: False with probability `dropped` / 65536."""
    return random_uint16(key, shape) >= dropped


def split_key(key: Array | None, n: int) -> tuple[Array | None, ...]:
    """Splits a key into n independent ones; None gives n times None.

    Raises:
        InputError: it is no key.
    """
    if key is None:
        return (None,) * n
    try:
        return tuple(jax.random.split(key, n))
    except (TypeError, ValueError):
        found = quoted(key)
        raise InputError(f"dropout_key: expected jax.random.key(...), found {found}") from None
