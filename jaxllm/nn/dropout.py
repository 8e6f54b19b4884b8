"""Dropout as a pure function: a key means training, None means inference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dropout(x: Float[Array, ...], rate: float, key: Array | None) -> Float[Array, ...]:
    """Zeroes a share `rate` of x and scales the rest by 1 / (1 - rate) (Srivastava et al. 2014)."""
    if key is None or rate == 0.0:
        return x
    # Held back from fusion: XLA on a CPU would draw the same numbers again for every use of them.
    keep = jax.lax.optimization_barrier(jax.random.bernoulli(key, 1.0 - rate, x.shape))
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def split(key: Array | None, n: int) -> tuple[Array | None, ...]:
    """n independent keys, or n times None."""
    return (None,) * n if key is None else tuple(jax.random.split(key, n))
