"""Tiny models and meshes of the first few devices, for code that runs on virtual devices."""

from __future__ import annotations

from typing import Any

import jax
import tiny
from jax.sharding import Mesh

from jaxllm.parallel.sharding import make_mesh


def make(family: str, **changes: Any) -> Any:
    """A model whose heads and vocabulary four devices can share."""
    heads = {"num_key_value_heads": 4} if family == "llama" else {}
    return tiny.make(family, vocab_size=64, **heads, **changes)


def mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    count = data * fsdp * tensor
    return make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[:count])
