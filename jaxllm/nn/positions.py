"""Sinusoidal positions, which are computed and not learned."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

EXACT = 2**11
"""Products of positions below 2**13 with multiples of 1 / EXACT have no rounding error."""


@dataclasses.dataclass(frozen=True)
class Sinusoids:
    """Sines of a position at falling frequencies, then their cosines (Vaswani et al. 2017).

    Frequency k is ``10000 ** (-k / steps)``. Marian and Pegasus have as many steps as frequencies.
    M2M100 and XGLM have one step less, so that the last frequency is 1 / 10000.
    """

    features: int
    """Width of the result; an even number."""
    steps: int
    zero_row: int | None = None
    """Number of a position whose vector is zero, fairseq's padding; None: there is none."""

    def __call__(self, positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Float32 vectors of positions.

        The turns of each sine are reduced to a fraction before they are rounded, so that a large
        position is as precise as a small one.
        """
        turns = self._frequencies() / (2 * math.pi)
        coarse = np.round(turns * EXACT) / EXACT
        fine = (turns - coarse).astype(np.float32)
        x = positions[..., None].astype(jnp.float32)
        whole = x * coarse.astype(np.float32)
        angles = 2 * math.pi * ((whole - jnp.round(whole)) + x * fine)
        vectors = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        if self.zero_row is None:
            return vectors
        return jnp.where(positions[..., None] == self.zero_row, 0.0, vectors)

    def table(self, rows: int) -> Float[np.ndarray, "P D"]:
        """The vectors of the first positions in float32, as files store them."""
        angles = np.arange(rows)[:, None] * self._frequencies()
        table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        if self.zero_row is not None:
            table[self.zero_row] = 0
        return table

    def _frequencies(self) -> Float[np.ndarray, " F"]:
        """Radians a position, in float64."""
        return 1 / 10000.0 ** (np.arange(self.features // 2) / self.steps)
