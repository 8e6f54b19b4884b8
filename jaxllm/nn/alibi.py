"""ALiBi, attention with linear biases (Press et al. 2021, arXiv:2108.12409)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int


def alibi_slopes(heads: int) -> np.ndarray:
    """Slope of each head, float32: powers of ``2 ** (-8 / n)`` for a power of two n.

    Other numbers of heads have the slopes of the next smaller power of two, n, and then every
    other slope of 2n heads.

    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    n = 2 ** math.floor(math.log2(heads))
    powers = [*(2 ** (-8 * (i + 1) / n) for i in range(n))]
    powers += [2 ** (-8 * (2 * i + 1) / (2 * n)) for i in range(heads - n)]
    return np.asarray(powers, np.float32)


class Alibi(nnx.Module):
    """Position bias of ALiBi: a slope for each head times the distance key - query.

    Distances count real tokens, so padding does not change the bias.
    """

    def __init__(self, heads: int):
        self.heads = heads

    def __call__(
        self, query_index: Int[Array, "B T"], key_index: Int[Array, "B S"]
    ) -> Float[Array, "B N T S"]:
        # transformers multiplies the slopes by the keys' indices: the same up to a constant of each
        # query, but less exact for long texts.
        distance = key_index[:, None, :] - query_index[..., None]
        slopes = jnp.asarray(alibi_slopes(self.heads))
        return slopes[:, None, None] * distance[:, None].astype(jnp.float32)
