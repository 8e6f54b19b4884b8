"""Arrays that lie on many devices, back on the host, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.common.errors import CheckpointError
from jaxllm.parallel.processes import together

NO_MORE = -1


@dataclasses.dataclass(frozen=True)
class HostArray:
    """An array that is brought to the host whenever it is looked at, and not kept there."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.read()
        return values if dtype is None else values.astype(dtype, copy=False)


def with_host_arrays(
    arrays: Mapping[str, jax.Array], act: Callable[[dict[str, HostArray]], None]
) -> None:
    """Calls ``act`` with the arrays, which it may look at in any order, as often as it likes.

    Of arrays that several processes share, process 0 alone calls it: whatever it looks at, the
    others help to gather, until it is done or has failed; then all of them return, or all raise.

    Raises:
        CheckpointError: it failed in process 0; what it raised, in that process.
    """
    if all(x.is_fully_addressable for x in arrays.values()):
        act({name: host_array(x, lambda x=x: whole(x)) for name, x in arrays.items()})
        return
    listed = list(arrays.values())

    def fetch(number: int) -> np.ndarray:
        multihost_utils.broadcast_one_to_all(np.int32(number))
        return gathered(listed[number])

    def lead() -> None:
        try:
            act(
                {
                    name: host_array(x, lambda i=i: fetch(i))
                    for i, (name, x) in enumerate(arrays.items())
                }
            )
        finally:
            multihost_utils.broadcast_one_to_all(np.int32(NO_MORE))

    def serve() -> None:
        while (number := int(multihost_utils.broadcast_one_to_all(np.int32(0)))) != NO_MORE:
            gathered(listed[number])

    together(lead if jax.process_index() == 0 else serve, CheckpointError)


def host_array(x: jax.Array, read: Callable[[], np.ndarray]) -> HostArray:
    return HostArray(x.shape, x.dtype, read)


def gathered(x: jax.Array) -> np.ndarray:
    """The whole array, in every process; all of them must ask for it."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def whole(x: jax.Array) -> np.ndarray:
    """The whole array of one process.

    Put together from its shards: jax would keep the copy that `np.asarray` makes of it.
    """
    if len(x.sharding.device_set) == 1:
        return np.asarray(x)
    result = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            result[shard.index] = np.asarray(shard.data)
    return result
