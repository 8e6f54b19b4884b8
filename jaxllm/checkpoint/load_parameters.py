"""Parameters from a file, one tensor at a time: whole, or only the parts that the devices need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxllm.checkpoint.source import Index, WeightSource, find_nonfinite
from jaxllm.common.errors import NonFiniteError
from jaxllm.models.weights import Entry
from jaxllm.parallel.sharding import parameter_sharding

Progress = Callable[[str, int, int], None]


def fill(
    entries: Sequence[tuple[str, Entry]],
    expected: Mapping[str, Any],
    source: WeightSource,
    *,
    param_dtype: Any,
    allow_nonfinite: bool,
    progress: Progress | None,
    mesh: Mesh | None,
) -> dict[str, jax.Array]:
    """Our parameters by path, from tensors that were checked to fit.

    Args:
        entries: each with the name of its tensor in the file.
        expected: shape and dtype of each parameter.
        param_dtype: None keeps what the file has, unless the model needs it wider.
        mesh: where parameters go, each where `parameter_sharding` says; None: one device. A process
            reads the parts for its own devices only.

    Raises:
        NonFiniteError: a weight is NaN or infinite, or would become so.
    """
    total = sum(source.info(name).nbytes for name, _ in entries)
    done, arrays = 0, {}
    for name, entry in entries:
        info = source.info(name)

        def checked(values: np.ndarray, name: str = name) -> np.ndarray:
            sentence = None if allow_nonfinite else find_nonfinite(name, values)
            if sentence:
                raise NonFiniteError(
                    f"{source.info(name).file}: {sentence}; pass allow_nonfinite=True "
                    "(--allow-nonfinite) to load it all the same"
                )
            return values

        whole = entry.split(checked(source.read(name))) if mesh is None else ()
        for number, ours in enumerate(entry.ours):
            shape, want = expected[ours].shape, expected[ours].dtype
            if param_dtype is None:
                want = jnp.promote_types(info.dtype, want)
            if mesh is None:
                check_range(f"{info.file}: {name}", whole[number], want)
                # Waited for: what a tensor passes through on its way would pile up with the next.
                arrays[ours] = jnp.array(whole[number], dtype=want).block_until_ready()
                continue

            def part(
                index: Index, name=name, entry=entry, number=number, shape=shape, want=want
            ) -> np.ndarray:
                theirs = checked(source.read(name, entry.index(number, shape[0], index)))
                values = theirs.T if entry.transposed else theirs
                check_range(f"{source.info(name).file}: {name}", values, want)
                return np.array(values, want, order="C")  # a copy: nothing keeps the file mapped

            arrays[ours] = in_parts(shape, parameter_sharding(ours, shape, mesh), part)
        source.forget(name)
        done += info.nbytes
        if progress is not None:
            progress(name, done, total)
    return arrays


def in_parts(
    shape: tuple[int, ...], sharding: NamedSharding, part: Callable[[Index], np.ndarray]
) -> jax.Array:
    """An array made of parts, each asked for once a process, and put where it is needed."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    shards = []
    for bounds, holders in devices.items():
        values = part(tuple(slice(*ends) for ends in bounds))
        shards += [jax.device_put(values, device) for device in holders]
        jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def check_range(name: str, tensor: np.ndarray, dtype: Any) -> None:
    """Casting to float16 must not make an infinity of a finite weight."""
    if dtype == np.float16 != tensor.dtype and tensor.size:
        largest = max(abs(float(tensor.max())), abs(float(tensor.min())))
        if float(np.finfo(np.float16).max) < largest < math.inf:
            raise NonFiniteError(
                f"{name}: holds {largest:g}, which float16 cannot; keep it in bfloat16 or float32"
            )
