"""What results depend on besides files and options: settings of JAX, versions and devices."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import jax

PACKAGES = (
    *("jaxllm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    *("tokenizers", "sentencepiece", "llguidance"),
)
COMPILER_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Environment variables with flags of the compilers, which may change rounding."""
SETTINGS = (
    *("jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset"),
    *("jax_default_matmul_precision", "jax_enable_x64"),
)
"""Settings of JAX, also made by environment variables, that change random numbers or precision."""


def jax_settings() -> dict[str, Any]:
    """`SETTINGS` of this process, as JSON values."""
    return {name: getattr(jax.config, name) for name in SETTINGS}


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that results depend on; compiler flags."""
    installed = {"python": platform.python_version()}
    kernels = () if os.environ.get("JAXLLM_CPU_KERNELS") == "0" else ("jaxllm-cpu-kernels",)
    for name in (*PACKAGES, *kernels):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed | {name: os.environ[name] for name in COMPILER_FLAGS if os.environ.get(name)}


def devices() -> dict[str, Any]:
    """Platform, kind and number of devices, and number of processes."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describes the first five differing fields with both values; empty if none differ.

    >>> changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": "x"})
    'b: was 2, is 3; c: was null, is "x"'
    """
    differences = [
        f"{name}: was {json.dumps(before.get(name))}, is {json.dumps(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return "; ".join(differences[:5])


def changed_environment(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A remark on versions and devices that are other ones than before; None if none are.

    Results may then differ in rounding, and dropout on a TPU draws other numbers, so that they are
    not those of a job that never stopped. A job may go on all the same: machines are replaced.
    """
    changed = changes(before, now)
    if not changed:
        return None
    return f"goes on in another environment ({changed}): results may differ in rounding"
