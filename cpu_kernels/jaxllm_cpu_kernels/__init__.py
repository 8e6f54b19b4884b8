"""Kernels for XLA on CPUs, in C++. jaxllm uses them if this package is installed."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import jax

NAMES = ("jaxllm_linear", "jaxllm_linear_int8", "jaxllm_linear_int4", "jaxllm_attention")


def handlers() -> dict[str, Any]:
    """The kernels' handlers for `jax.ffi.register_ffi_target`, by name."""
    library = _library()
    return {name: jax.ffi.pycapsule(getattr(library, name)) for name in NAMES}


def instruction_set() -> str:
    """Instructions that the kernels use on this processor: AVX-512, AVX2 or portable."""
    name = _library().jaxllm_instruction_set
    name.restype = ctypes.c_char_p
    return name().decode()


def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("jaxllm_cpu_kernels._kernels")
    if spec is None or spec.origin is None:
        raise ImportError("jaxllm_cpu_kernels: the library is not built; install the package again")
    return ctypes.CDLL(spec.origin)
