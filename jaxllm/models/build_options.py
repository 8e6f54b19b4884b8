"""Options for building a model that are not in config.json: dtypes, kernels, remat, scan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Options:
    """Options for building a model.

    `dtype` is the compute dtype, `param_dtype` the dtype of the weights. `attn_implementation`:
    "eager" (the reference), "blockwise" (`nn/blockwise.py`), "splash" (`nn/splash.py`, TPUs only),
    "xla" or "cudnn" (`jax.nn.dot_product_attention`). `remat` recomputes each block's activations
    in the backward pass. `scan_layers` runs equal blocks in a scan wherever there is no KV cache.
    """

    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    attn_implementation: str = "eager"
    remat: bool = False
    scan_layers: bool = False

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


FLOAT32 = Options()
