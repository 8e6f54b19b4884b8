"""Dropout as a pure function: a key means training, None means inference."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.nn.platform import random_uint16

LEVELS = 1 << 16


def dropout(x: Float[Array, ...], rate: float, key: Array | None) -> Float[Array, ...]:
    """Zeroes a share `rate` of x and scales the rest so that the mean stays (Srivastava et al.
    2014). The share is a multiple of 1/65536, the nearest one, and the scale fits it exactly."""
    dropped = round(rate * LEVELS)
    if key is None or dropped == 0:
        return x
    if dropped == LEVELS:
        return jnp.zeros_like(x)
    kept = jnp.where(keep(key, dropped, x.shape), x * (LEVELS / (LEVELS - dropped)), 0)
    return kept.astype(x.dtype)


def keep(key: Array, dropped: int, shape: tuple[int, ...]) -> Bool[Array, ...]:
    """Dropout mask: False at `dropped` of 65536 elements, on average."""
    return random_uint16(key, math.prod(shape)).reshape(shape) >= dropped


def split(key: Array | None, n: int) -> tuple[Array | None, ...]:
    """n independent keys, or n times None."""
    return (None,) * n if key is None else tuple(jax.random.split(key, n))
