"""A call of generate() on a mesh: where its arrays go, and what processes must agree on."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxllm.common.errors import UnsupportedError
from jaxllm.generation.call.prepare import Request
from jaxllm.parallel.placement import put_everywhere, put_rows


def shared_key(key: Any, mesh: Mesh | None) -> Any:
    """The caller's key; where there is none and several processes draw, the same one for all."""
    if key is not None or mesh is None or not mesh.is_multi_process:
        return key
    return int(multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32))))


def placed(request: Request, mesh: Mesh) -> Request:
    """The request with its arrays on the mesh: rows are split, settings are everywhere.

    Raises:
        UnsupportedError: max_time, where several processes could part ways.
    """
    if mesh.is_multi_process and request.clocks:
        raise UnsupportedError(
            "max_time: the clocks of several processes differ; limit max_new_tokens instead"
        )
    prompt = dataclasses.replace(request.prompt, kind=put_everywhere(request.prompt.kind, mesh))
    return dataclasses.replace(
        request,
        mesh=mesh,
        prompt=put_rows(prompt, mesh),
        negative=put_rows(request.negative, mesh),
        settings=put_everywhere(request.settings, mesh),
        strategy=put_everywhere(request.strategy, mesh),
    )


def readable(tree: Any, mesh: Mesh | None) -> Any:
    """The same arrays, such that every process can read all of them."""
    if mesh is None or not mesh.is_multi_process:
        return tree
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, everywhere), tree)
