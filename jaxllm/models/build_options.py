"""Options for building a model that are not in config.json: dtypes, kernels, remat, scan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxllm.nn.attention import implementation_for


@dataclasses.dataclass(frozen=True)
class Options:
    """Options for building a model.

    `dtype` is the compute dtype, `param_dtype` the dtype of the weights. `attn_implementation`:
    "eager" (the reference), "blockwise" (by blocks of queries), "splash" (TPUs only), "triton",
    "cudnn" or "mosaic" (GPUs only), or "xla" (`jax.nn.dot_product_attention`). `remat` names what
    the backward pass recomputes of each block: False, "full" (or True), or "dots", which keeps the
    results of linear layers.
    `scan_layers` runs equal blocks in a scan wherever there is no KV cache. `platform` is the one
    that the model runs on; it decides layouts, and which of two ways to compute the same.
    """

    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    attn_implementation: str = "eager"
    remat: bool | str = False
    scan_layers: bool = False
    platform: str = "cpu"

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def stack(self) -> dict[str, Any]:
        """The options of a `Stack`."""
        return {name: getattr(self, name) for name in ("remat", "scan_layers", "platform")}

    @classmethod
    def on(cls, platform: str, *, attn_implementation: str = "auto", **options: Any) -> Options:
        """Options for a platform, which decides what "auto" attention is.

        Raises:
            UnsupportedError: as `implementation_for`.
        """
        implementation = implementation_for(attn_implementation, platform)
        return cls(attn_implementation=implementation, platform=platform, **options)


FLOAT32 = Options()
