"""Gathers sharded arrays to the host, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.common.errors import CheckpointError
from jaxllm.parallel.processes import in_all_processes

STOP = -1


@dataclasses.dataclass(frozen=True)
class LazyHostArray:
    """Device array that is copied to the host at each access and not cached there."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.read()
        return values if dtype is None else values.astype(dtype, copy=False)


def with_host_arrays(
    arrays: Mapping[str, jax.Array], act: Callable[[dict[str, LazyHostArray]], None]
) -> None:
    """Calls ``act`` with the arrays, readable in any order and repeatedly.

    For arrays that several processes share, only process 0 calls it; the others take part in the
    all-gather of each array it reads, until it returns or fails. Then all return, or all raise.

    Raises:
        CheckpointError: ``act`` failed in process 0, where its own error is raised.
    """
    if all(x.is_fully_addressable for x in arrays.values()):
        act({n: LazyHostArray(x.shape, x.dtype, lambda x=x: local(x)) for n, x in arrays.items()})
        return
    ordered = list(arrays.values())

    def gather(number: int) -> np.ndarray:
        multihost_utils.broadcast_one_to_all(np.int32(number))
        return all_gather(ordered[number])

    def read_and_share() -> None:
        try:
            act(
                {
                    name: LazyHostArray(x.shape, x.dtype, lambda i=i: gather(i))
                    for i, (name, x) in enumerate(arrays.items())
                }
            )
        finally:
            multihost_utils.broadcast_one_to_all(np.int32(STOP))

    def take_part() -> None:
        while (number := int(multihost_utils.broadcast_one_to_all(np.int32(0)))) != STOP:
            all_gather(ordered[number])

    in_all_processes(read_and_share if jax.process_index() == 0 else take_part, CheckpointError)


def all_gather(x: jax.Array) -> np.ndarray:
    """Gathers the full array to every process; all of them must call."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def local(x: jax.Array) -> np.ndarray:
    """Full array on the host, if all its shards are in this process.

    Copied shard by shard: `np.asarray` of a sharded array is cached by JAX.
    """
    if len(x.sharding.device_set) == 1:
        return np.asarray(x)
    result = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            result[shard.index] = np.asarray(shard.data)
    return result
