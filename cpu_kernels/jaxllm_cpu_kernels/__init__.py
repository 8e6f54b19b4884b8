"""Kernels for XLA on CPUs, in C++. jaxllm uses them if this package is installed."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import jax

NAMES = ("jaxllm_linear", "jaxllm_linear_int8", "jaxllm_linear_int4", "jaxllm_attention")


def handlers() -> dict[str, Any]:
    """The kernels' handlers for `jax.ffi.register_ffi_target`, by name."""
    spec = importlib.util.find_spec("jaxllm_cpu_kernels._kernels")
    if spec is None or spec.origin is None:
        raise ImportError("jaxllm_cpu_kernels: the library is not built; install the package again")
    library = ctypes.CDLL(spec.origin)
    return {name: jax.ffi.pycapsule(getattr(library, name)) for name in NAMES}
