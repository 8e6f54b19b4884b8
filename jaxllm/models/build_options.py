"""How a model is built, as opposed to what it is: nothing here is in config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Options:
    """`dtype` is what is computed in, `param_dtype` what weights are kept in.

    `attn_implementation`: "eager" (written out), "xla" or "cudnn" (`jax.nn.dot_product_attention`).
    `remat` recomputes each block's activations in the backward pass.
    """

    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    attn_implementation: str = "eager"
    remat: bool = False

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


FLOAT32 = Options()
