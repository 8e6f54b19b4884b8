"""The encoder's input (or the prompt), for the processors that look at it."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError


class EncoderTokens(NamedTuple):
    """Token ids ``[B, S]`` and which of them are real."""

    ids: Int[Array, "B S"]
    real: Bool[Array, "B S"]

    @classmethod
    def of(cls, owner: str, ids: Int[Array, "B S"], mask: Bool[Array, "B S"] | None) -> Self:
        """Checked ids and mask; one row may come without its batch axis.

        Raises:
            InputError: The ids are not ``[B, S]``, or the mask has another shape.
        """
        ids = jnp.atleast_2d(jnp.asarray(ids, jnp.int32))
        real = ids >= 0 if mask is None else jnp.atleast_2d(jnp.asarray(mask, bool))
        if ids.ndim != 2 or real.shape != ids.shape:
            raise InputError(
                f"{owner}: `encoder_input_ids` must be [batch, length] and its mask alike, "
                f"but they are {ids.shape} and {real.shape}"
            )
        return cls(ids, real)

    def rows(self, count: int) -> tuple[Int[Array, "rows S"], Bool[Array, "rows S"]]:
        """The ids and mask for ``count`` rows, each item repeated for its beams."""
        batch = self.ids.shape[0]
        if count % batch:
            raise InputError(f"{count} rows of scores do not divide among {batch} encoder inputs")
        return jnp.repeat(self.ids, count // batch, 0), jnp.repeat(self.real, count // batch, 0)
