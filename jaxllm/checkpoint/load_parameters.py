"""Reads parameters from a weight file: whole tensors, or the shards of this process's devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import Blocks
from jaxllm.checkpoint.source import (
    XLA_ALIGNMENT,
    Index,
    WeightSource,
    aligned_empty,
    find_nonfinite,
)
from jaxllm.common.errors import InputError, NonFiniteError
from jaxllm.models.quantize import BLOCK_FORMATS, Quantize
from jaxllm.models.weights import Entry, tensors_of
from jaxllm.nn.quantized import BlockMatrix, QuantizedMatrix
from jaxllm.parallel.device_memory import format_bytes, total_memory
from jaxllm.parallel.sharding import parameter_path, parameter_sharding, row_axis

ReadMatrix = Callable[["Tensor", int], QuantizedMatrix]
"""Reads the quantized matrix of parameter number n that a tensor holds."""
LoadProgress = Callable[[str, int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")

LEAST_QUANTIZED_BYTES = 0.5
"""Bytes of a quantized weight: those of int4, without its scales."""
READ_THREADS = max(2, min(16, os.cpu_count() or 1))
"""Tensors read at a time: one thread does not use the bandwidth of a disk or the memory."""
READ_AHEAD = 2 * 2**30
"""Bytes of tensors that are read ahead. The two next ones are, whatever their size."""
QUANTIZED_BLOCK = 64 * 2**20
"""Bytes of the float rows that are quantized at a time."""


def load_parameters(
    entries: Mapping[str, Entry],
    expected: Mapping[str, Any],
    source: WeightSource,
    *,
    param_dtype: DTypeLike | None,
    matrices: Mapping[str, ReadMatrix],
    allow_nonfinite: bool,
    progress: LoadProgress | None,
    mesh: Mesh | None,
) -> tuple[dict[str, jax.Array], dict[str, QuantizedMatrix]]:
    """Loads the parameters, from tensors whose names and shapes are checked.

    Args:
        entries: entry of the weight table for each tensor of the file.
        expected: shape and dtype of each parameter.
        param_dtype: None keeps the file's dtype, unless the model needs a wider one.
        matrices: reads the quantized weight of a layer, by the layer's path.
        mesh: shards each parameter by `parameter_sharding`; None: one device. A process reads the
            shards of its own devices only, but whole tensors where it quantizes them.

    Returns:
        The float parameters by path, and the quantized matrices by the layer's path.
    """
    total = sum(source.info(name).nbytes for name in entries)
    done, arrays, quantized = 0, {}, {}

    def dtype_of(name: str, ours: str) -> np.dtype:
        dtype = expected[ours].dtype
        if param_dtype is None:
            dtype = jnp.promote_types(source.info(name).dtype, dtype)
        return dtype

    check_fits(
        sum(
            math.prod(expected[ours].shape)
            * (LEAST_QUANTIZED_BYTES if layer in matrices else dtype_of(name, ours).itemsize)
            for name, entry in entries.items()
            for ours, layer in zip(entry.parameters, entry.modules, strict=True)
        ),
        mesh,
    )

    def read(item: tuple[str, Entry]) -> list[Any]:
        """The tensor's parameters on the devices: arrays, and quantized matrices."""
        name, entry = item
        tensor = Tensor(source, name, entry, allow_nonfinite)
        dtypes = [dtype_of(name, ours) for ours in entry.parameters]
        is_whole = mesh is None and not any(layer in matrices for layer in entry.modules)
        if is_whole:  # one read of a fused tensor
            # Blocking keeps the temporary copies of several tensors from piling up.
            return jax.block_until_ready(jax.device_put(tensor.parameters(dtypes)))
        read: list[Any] = []
        for number, (ours, layer) in enumerate(zip(entry.parameters, entry.modules, strict=True)):
            shape, dtype = expected[ours].shape, dtypes[number]
            if layer in matrices:
                read.append(placed(layer, matrices[layer](tensor, number), mesh))
            elif mesh is None:
                read.append(jax.device_put(on_host(tensor.part(number), dtype)))
            else:
                sharding = parameter_sharding(ours, shape, mesh)
                shard = functools.partial(tensor.read_shard, number, shape[0], dtype)
                read.append(sharded_array(shape, sharding, shard))
        return jax.block_until_ready(read)

    # The largest first: what it takes to convert it comes on top of few others.
    largest_first = sorted(entries.items(), key=lambda item: -source.info(item[0]).nbytes)
    sizes = [source.info(name).nbytes for name, _ in largest_first]
    for (name, entry), read_parameters in zip(
        largest_first, map_ahead(read, largest_first, sizes), strict=True
    ):
        for ours, layer, x in zip(entry.parameters, entry.modules, read_parameters, strict=True):
            if layer in matrices:
                quantized[layer] = x
            else:
                arrays[ours] = x
        source.release_pages(name)
        done += source.info(name).nbytes
        if progress is not None:
            progress(name, done, total)
    return arrays, quantized


def check_fits(needed: float, mesh: Mesh | None) -> None:
    """Raises InputError if weights of so many bytes are more than the devices' memory.

    Without this the system ends the process when its memory is full, without a word.
    """
    chosen = jax.device_put(np.int32(0)).devices() if mesh is None else mesh.local_devices
    processes = 1 if mesh is None else jax.process_count()
    memory = total_memory(list(chosen)) * processes
    if needed > memory:
        raise InputError(
            f"the weights take {format_bytes(int(needed))}, and there are {format_bytes(memory)} "
            "of memory: load them in a smaller param_dtype (--param-dtype), with quantize= "
            "(--quantize), or on more devices with mesh= (--mesh)"
        )


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], sizes: Iterable[int]
) -> Iterator[Result]:
    """`map` in `READ_THREADS` threads, ahead of the result that is used.

    Args:
        sizes: bytes of each item. Items of at most `READ_AHEAD` bytes together are in work at once,
            but always two items.
    """
    with ThreadPoolExecutor(READ_THREADS) as pool:
        pending: deque[tuple[Future[Result], int]] = deque()
        ahead = 0
        for item, size in zip(items, sizes, strict=True):
            while (len(pending) > 2 and ahead + size > READ_AHEAD) or len(pending) > READ_THREADS:
                future, done = pending.popleft()
                ahead -= done
                yield future.result()
            pending.append((pool.submit(function, item), size))
            ahead += size
        for future, _ in pending:
            yield future.result()


def on_host(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in C order, in memory that `jax.device_put` takes over on a CPU.

    A copy, except for an array of its own that `aligned_empty` made.
    """
    if values.flags.carray and values.dtype == dtype and not values.ctypes.data % XLA_ALIGNMENT:
        return values
    copy = aligned_empty(values.shape, dtype)
    np.copyto(copy, values, casting="unsafe")
    return copy


def quantizing(quantize: Quantize) -> ReadMatrix:
    """Reads a float matrix and quantizes it on the default device, `QUANTIZED_BLOCK` at a time.

    Every row of a matrix has scales of its own, so that blocks of rows can be quantized alone.
    """

    def read(tensor: Tensor, number: int) -> QuantizedMatrix:
        matrix = tensor.part(number)
        rows = max(1, QUANTIZED_BLOCK // matrix[:1].nbytes)
        blocks = [
            jax.tree.map(np.asarray, jax.jit(quantize)(jnp.asarray(matrix[start : start + rows])))
            for start in range(0, len(matrix), rows)
        ]

        def joined(path: tuple[Any, ...], *parts: np.ndarray) -> np.ndarray:
            # Of a stack of matrices the blocks are some of the matrices.
            axis = 0 if matrix.ndim == 3 else row_axis(f".matrix.{parameter_path(path)}")
            return np.concatenate(parts, axis)

        return jax.tree_util.tree_map_with_path(joined, *blocks)

    return read


def keeping_blocks(view: HFView) -> ReadMatrix:
    """Reads the blocks of a GGUF file as they are."""

    def read(tensor: Tensor, number: int) -> QuantizedMatrix:
        blocks = view.blocks(tensor.name)
        assert blocks is not None  # the caller asked for its format
        for x in (blocks.scales, blocks.offsets):
            problem = None if x is None else find_nonfinite(tensor.name, x)
            if problem:
                raise NonFiniteError(f"{view.file.path}: scales of {problem}")
        return block_matrix(blocks.map(lambda x: tensor.entry.parts(x)[number]))

    return read


def block_matrix(blocks: Blocks) -> BlockMatrix:
    """The blocks of a GGUF file as a matrix of host arrays."""
    rows = blocks.values.ndim - 3  # after the experts of a stack
    values, scales, offsets = (
        None if x is None else np.ascontiguousarray(x.swapaxes(rows, rows + 1))
        for x in (blocks.values, blocks.scales, blocks.offsets)
    )
    assert values is not None
    assert scales is not None
    groups: Any = values.astype(BLOCK_FORMATS[blocks.format].groups)
    matrix: Any = (scales, offsets)
    return BlockMatrix(blocks.format, groups, *matrix)


def placed(layer: str, matrix: QuantizedMatrix, mesh: Mesh | None) -> QuantizedMatrix:
    """A quantized matrix of host arrays on the device, or sharded over the mesh."""
    if mesh is None:
        return jax.device_put(matrix)

    def shard(key_path: tuple[Any, ...], x: np.ndarray) -> jax.Array:
        path = f"{layer}.matrix.{parameter_path(key_path)}"
        return sharded_array(x.shape, parameter_sharding(path, x.shape, mesh), x.__getitem__)

    return jax.tree_util.tree_map_with_path(shard, matrix)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the file, checked for NaN and infinity as it is read."""

    source: WeightSource
    name: str
    entry: Entry
    allow_nonfinite: bool

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice of the tensor, whose rows are in the order of our parameters' if `index`
        is not empty."""
        if index and self.entry.order:
            rows, *rest = index
            values = self.source.read(self.name)[np.asarray(self.entry.order[rows]), *rest]
        else:
            values = self.source.read(self.name, index)
        for name, part in () if self.allow_nonfinite else self.named(values, index):
            if problem := find_nonfinite(name, part):
                raise NonFiniteError(
                    f"{self.source.info(self.name).file}: {problem}; pass allow_nonfinite=True "
                    "(--allow-nonfinite) to load it all the same"
                )
        return values

    def named(self, values: np.ndarray, index: Index = ()) -> Iterator[tuple[str, np.ndarray]]:
        """The values of this slice of the tensor, or of each expert's tensor, with their names."""
        if not self.entry.is_stack:
            yield self.name, values
            return
        first = index[0].start or 0 if index else 0
        names = tensors_of(self.name, first + len(values))
        yield from zip(itertools.islice(names, first, None), values, strict=True)

    def parameters(self, dtypes: list[np.dtype]) -> list[np.ndarray]:
        """Copies of the parameters that this tensor holds, cast to their dtypes."""
        parts = self.entry.split(self.read(()))
        for part, dtype in zip(parts, dtypes, strict=True):
            self.check_range(part, dtype)
        return [on_host(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]

    def part(self, number: int) -> np.ndarray:
        """The whole parameter `number` that this tensor holds."""
        return self.entry.split(self.read(()))[number]

    def read_shard(self, number: int, rows: int, dtype: DTypeLike, index: Index) -> np.ndarray:
        """Reads a slice of the parameter `number` that this tensor holds, cast to `dtype`."""
        if self.entry.columns:  # weights of norms, which are small
            values = self.part(number)[index]
        else:
            values = self.read(self.entry.index(number, rows, index))
            values = values.T if self.entry.transposed else values
        self.check_range(values, dtype, index)
        return np.array(values, dtype, order="C")  # a copy: nothing keeps the file mapped

    def check_range(self, values: np.ndarray, dtype: DTypeLike, index: Index = ()) -> None:
        """Raises NonFiniteError if casting to float16 would turn a finite weight into infinity."""
        for name, part in self.named(values, index):
            check_range(f"{self.source.info(self.name).file}: {name}", part, dtype)


def sharded_array(
    shape: tuple[int, ...], sharding: NamedSharding, read: Callable[[Index], np.ndarray]
) -> jax.Array:
    """A sharded array; each distinct shard is read once per process and put on its devices."""
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    shards = []
    for bounds, holders in devices.items():
        values = read(tuple(slice(*ends) for ends in bounds))
        shards += [jax.device_put(values, device) for device in holders]
        jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def check_range(name: str, tensor: np.ndarray, dtype: DTypeLike) -> None:
    """Raises NonFiniteError if casting to float16 would turn a finite weight into infinity."""
    if np.dtype(dtype) == np.float16 and tensor.dtype != np.float16 and tensor.size:
        largest = max(abs(float(tensor.max())), abs(float(tensor.min())))
        if float(np.finfo(np.float16).max) < largest < math.inf:
            raise NonFiniteError(
                f"{name}: holds {largest:g}, which float16 cannot; keep it in bfloat16 or float32"
            )
