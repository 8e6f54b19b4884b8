"""Kernels of the optional package `jaxllm_cpu_kernels` (folder cpu_kernels/), called through XLA.

`jaxllm.nn.platform` says where they replace XLA's own code. ``JAXLLM_CPU_KERNELS=0`` in the
environment leaves them out.
"""

from __future__ import annotations

import functools
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int4, Int8

from jaxllm.parallel.mesh import context_mesh

MAX_ROWS = 64
"""Rows of x up to which a product is a kernel's; XLA is as fast for more; docs/performance.md."""

INT4_GROUP = 32
"""Entries of a row of int4 that share a multiplier."""


@functools.cache
def registered() -> bool:
    """True if the package is installed; its kernels are then known to XLA."""
    if os.environ.get("JAXLLM_CPU_KERNELS") == "0":
        return False
    try:
        package = importlib.import_module("jaxllm_cpu_kernels")
    except ModuleNotFoundError:
        return False
    for name, handler in package.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True


def usable(*arrays: Array) -> bool:
    """True if a kernel can compute with these float arrays: float32, and not sharded."""
    all_float32 = all(x.dtype == jnp.float32 for x in arrays)
    return all_float32 and context_mesh() is None and registered()


def product(x: Float[Array, "B I"], w: Float[Array, "O I"]) -> Float[Array, "B O"]:
    """``x W^T`` in float32."""
    return _call("jaxllm_linear", (len(x), len(w)), x, w)


def int8_product(
    x: Float[Array, "B I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "B O"]:
    """``x W^T`` of a matrix ``W[o] = scale[o] * values[o]``, in float32."""
    return _call("jaxllm_linear_int8", (len(x), len(values)), x, values, scale)


def int4_product(
    x: Float[Array, "B I"],
    groups: Int4[Array, "G O 32"],
    multipliers: Int8[Array, "G O"],
    scale: Float[Array, " O"],
) -> Float[Array, "B O"]:
    """``x W^T`` of an `Int4Matrix` in groups of `INT4_GROUP`, in float32."""
    return _call("jaxllm_linear_int4", (len(x), len(scale)), x, groups, multipliers, scale)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "BK S H"],
    v: Float[Array, "BK S H"],
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Eager attention in float32; reads only the slots that a query sees, and those between."""
    biases = () if bias is None else (bias,)
    return _call("jaxllm_attention", q.shape, q, k, v, visible, *biases, scale=np.float32(scale))


def _call(name: str, shape: tuple[int, ...], *arrays: Array, **numbers: np.float32) -> Array:
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.ffi.ffi_call(name, out, vmap_method="sequential")(*arrays, **numbers)
