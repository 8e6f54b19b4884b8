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
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import Blocks
from jaxllm.checkpoint.source import (
    XLA_ALIGNMENT,
    Index,
    TensorInfo,
    WeightSource,
    aligned_empty,
    copy_in_blocks,
    find_nonfinite,
)
from jaxllm.common.errors import CheckpointError, InputError, NonFiniteError
from jaxllm.common.hardware import default_device, format_bytes, total_memory
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.models.quantize import BLOCK_FORMATS, FORMATS
from jaxllm.models.weights import Entry, tensors_of
from jaxllm.nn.quantized import BlockMatrix, QuantizedMatrix
from jaxllm.parallel.sharding import parameter_path, parameter_sharding, part_axes

Bounds = tuple[tuple[int, int], ...]
"""Start and end of a slice along each axis."""
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
    source: StackedTensors,
    *,
    matrices: Mapping[str, QuantizedMatrix],
    allow_nonfinite: bool,
    progress: LoadProgress | None,
    mesh: Mesh | None,
) -> dict[str, jax.Array]:
    """Loads the parameters by path, from tensors whose names and shapes are checked.

    Args:
        entries: entry of the weight table for each tensor of the file.
        expected: shape and dtype of each parameter.
        matrices: shapes of the matrix of each layer that is quantized, by the layer's path. Its
            arrays are loaded in place of the layer's weight.
        mesh: shards each parameter by `parameter_sharding`; None: one device. A process reads the
            shards of its own devices only, but whole rows where it quantizes them.
    """
    total = sum(source.info(name).nbytes for name in entries)
    done, arrays = 0, {}

    check_fits(
        sum(
            math.prod(expected[ours].shape)
            * (LEAST_QUANTIZED_BYTES if layer in matrices else expected[ours].dtype.itemsize)
            for entry in entries.values()
            for ours, layer in zip(entry.parameters, entry.modules, strict=True)
        ),
        mesh,
    )

    def read(item: tuple[str, Entry]) -> dict[str, Any]:
        """The tensor's parameters by path, on the devices."""
        name, entry = item
        tensor = Tensor(source, name, entry, allow_nonfinite)
        dtypes = [expected[ours].dtype for ours in entry.parameters]
        is_whole = mesh is None and not any(layer in matrices for layer in entry.modules)
        if is_whole:  # one read of a fused tensor
            values = dict(zip(entry.parameters, tensor.parameters(dtypes), strict=True))
            # Blocking keeps the temporary copies of several tensors from piling up.
            return jax.block_until_ready(jax.device_put(values))
        found: dict[str, Any] = {}
        for number, (ours, layer) in enumerate(zip(entry.parameters, entry.modules, strict=True)):
            shape, dtype = expected[ours].shape, dtypes[number]
            if layer in matrices:
                found |= load_matrix(tensor, number, shape, layer, matrices[layer], mesh)
            elif mesh is None:
                found[ours] = jax.device_put(on_host(tensor.part(number, shape), dtype))
            else:
                shard = functools.partial(tensor.read_shard, ours, number, shape, dtype)
                target = sharded_shape(ours, shape, dtype, mesh)
                found |= sharded_arrays({ours: target}, lambda _, bounds: bounds, shard)
        return jax.block_until_ready(found)

    # The largest first: what it takes to convert it comes on top of few others.
    largest_first = sorted(entries.items(), key=lambda item: -source.info(item[0]).nbytes)
    sizes = [source.info(name).nbytes for name, _ in largest_first]
    for (name, _), found in zip(largest_first, map_ahead(read, largest_first, sizes), strict=True):
        arrays |= found
        source.release_pages(name)
        done += source.info(name).nbytes
        if progress is not None:
            progress(name, done, total)
    return arrays


def check_fits(needed: float, mesh: Mesh | None) -> None:
    """Raises InputError if weights of so many bytes are more than the devices' memory.

    Without this the system ends the process when its memory is full, without a word.
    """
    chosen = [default_device()] if mesh is None else mesh.local_devices
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
    run = with_settings_of_this_thread(function)
    with ThreadPoolExecutor(READ_THREADS) as pool:
        pending: deque[tuple[Future[Result], int]] = deque()
        ahead = 0
        for item, size in zip(items, sizes, strict=True):
            while (len(pending) > 2 and ahead + size > READ_AHEAD) or len(pending) > READ_THREADS:
                future, done = pending.popleft()
                ahead -= done
                yield future.result()
            pending.append((pool.submit(run, item), size))
            ahead += size
        for future, _ in pending:
            yield future.result()


def on_host(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The values in C order, in memory that `jax.device_put` takes over on a CPU.

    A copy, except for an array of its own that `aligned_empty` made.
    """
    if values.flags.carray and values.dtype == dtype and not values.ctypes.data % XLA_ALIGNMENT:
        return values
    return copied(values, dtype)


def copied(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy of the values in C order, as `on_host` makes it."""
    copy = aligned_empty(values.shape, dtype)
    copy_in_blocks(copy, values)
    return copy


def load_matrix(
    tensor: Tensor,
    number: int,
    shape: tuple[int, ...],
    layer: str,
    matrix: QuantizedMatrix,
    mesh: Mesh | None,
) -> dict[str, jax.Array]:
    """Loads the arrays of a quantized matrix by path. With a mesh, it loads them shard by shard.

    Every row has scales of its own. A shard of its columns needs whole rows of floats, which are
    quantized together, but only its own blocks of a GGUF file.

    Args:
        number: which of the tensor's parameters is the layer's weight.
        shape: shape of the weight.
        matrix: shapes of the matrix.
    """
    blocks = BLOCK_FORMATS.get(matrix.format)

    def read(index: Index) -> dict[str, np.ndarray]:
        if blocks is not None:
            return matrix_arrays(block_matrix(tensor.blocks(number, shape, index)), layer)
        return matrix_arrays(quantized(tensor.part(number, shape, index), matrix.format), layer)

    if mesh is None:
        return jax.device_put(read(tuple(slice(0, size) for size in shape)))

    def source_bounds(path: str, bounds: Bounds) -> Bounds:
        """The part of the weight from which a shard of an array is made."""
        axes = part_axes(path.removeprefix(f"{layer}."), _AXES[-len(shape) :])
        ends = dict(zip(axes, bounds, strict=True))
        columns = (0, shape[-1])
        if blocks is not None:
            start, stop = ends["columns"]  # in groups
            columns = (start * blocks.size, stop * blocks.size)
        return (*(ends[axis] for axis in _AXES[-len(shape) : -1]), columns)

    targets = {
        path: sharded_shape(path, x.shape, x.dtype, mesh)
        for path, x in matrix_arrays(matrix, layer).items()
    }
    return sharded_arrays(targets, source_bounds, read)


_AXES = ("experts", "rows", "columns")
"""Axes of a stack of weights. A single weight has the last two axes."""


def matrix_arrays(matrix: QuantizedMatrix, layer: str) -> dict[str, Any]:
    """The arrays of a layer's quantized matrix by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(matrix)
    return {f"{layer}.matrix.{parameter_path(path)}": x for path, x in leaves}


def quantized(matrix: np.ndarray, name: str) -> QuantizedMatrix:
    """Quantizes rows to a format on the default device, `QUANTIZED_BLOCK` at a time."""
    rows = max(1, QUANTIZED_BLOCK // matrix[:1].nbytes)
    blocks = [
        jax.tree.map(np.asarray, quantize_rows(matrix[start : start + rows], name))
        for start in range(0, len(matrix), rows)
    ]

    def joined(path: tuple[Any, ...], *parts: np.ndarray) -> np.ndarray:
        axes = part_axes(f"matrix.{parameter_path(path)}", _AXES[-matrix.ndim :])
        # Of a stack of matrices the blocks are some of the matrices.
        return np.concatenate(parts, axes.index(_AXES[-matrix.ndim]))

    return jax.tree_util.tree_map_with_path(joined, *blocks)


def quantize_rows(rows: np.ndarray, name: str) -> QuantizedMatrix:
    """Quantizes rows that fit on the default device together."""
    if not (rows.flags.c_contiguous and rows.flags.aligned):
        rows = copied(rows, rows.dtype)
    return jax.jit(FORMATS[name])(jnp.asarray(rows))


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


class StackedTensors(WeightSource):
    """View of a weight file in which some tensors are stacked along a new first axis: files have a
    tensor for each expert of a layer, a model has the stack of them.

    A stack whose tensors are not all in the file is left out; its tensors have their own names.
    """

    def __init__(self, source: WeightSource, counts: Mapping[str, int]) -> None:
        """
        Args:
            counts: number of tensors of each stack by its name, which has ``{e}`` for the number
                of a tensor. Names that the file itself has (GGUF) are left as they are.
        """
        self.source = source
        self.from_flax = source.from_flax
        self.repeated_bytes = source.repeated_bytes
        present = set(source.names())
        self._parts = {
            name: tuple(tensors_of(name, count))
            for name, count in counts.items()
            if name not in present and all(part in present for part in tensors_of(name, count))
        }

    def tensors(self, name: str) -> tuple[str, ...]:
        """Names in the file of the tensors that a name stands for."""
        return self._parts.get(name, (name,))

    def names(self) -> list[str]:
        stack_of = {part: name for name, parts in self._parts.items() for part in parts}
        return list(dict.fromkeys(stack_of.get(name, name) for name in self.source.names()))

    def info(self, name: str) -> TensorInfo:
        first, *others = (self.source.info(part) for part in self.tensors(name))
        if name not in self._parts:
            return first
        for part, info in zip(self.tensors(name)[1:], others, strict=True):
            if (info.shape, info.dtype) != (first.shape, first.dtype):
                raise CheckpointError(
                    f"{info.file}: {part} is {info.dtype} {list(info.shape)}, but "
                    f"{self.tensors(name)[0]} is {first.dtype} {list(first.shape)}; all experts of "
                    "a layer must be alike"
                )
        nbytes = first.nbytes + sum(info.nbytes for info in others)
        shape = (len(others) + 1, *first.shape)
        return dataclasses.replace(first, shape=shape, nbytes=nbytes)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        if name not in self._parts:
            return self.source.read(name, index)
        chosen, *rest = index or (slice(None),)
        parts = self._parts[name][chosen]
        info = self.source.info(self._parts[name][0])
        sizes = [len(range(*s.indices(n))) for s, n in zip(rest, info.shape, strict=False)]
        stack = aligned_empty((len(parts), *sizes, *info.shape[len(sizes) :]), info.dtype)
        for expert, part in enumerate(parts):
            stack[expert] = self.source.read(part, tuple(rest))
        return stack

    def release_pages(self, name: str) -> None:
        for part in self.tensors(name):
            self.source.release_pages(part)

    def close(self) -> None:
        self.source.close()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the file, checked for NaN and infinity as it is read."""

    source: StackedTensors
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

    def part(self, number: int, shape: tuple[int, ...], index: Index = ()) -> np.ndarray:
        """Reads the parameter `number` that this tensor holds, which has this shape, or a slice."""
        index = index or tuple(slice(0, size) for size in shape)
        if self.entry.columns:  # weights of norms, which are small
            return self.entry.split(self.read(()))[number][index]
        values = self.read(self.entry.index(number, shape[0], index))
        return values.T if self.entry.transposed else values

    def read_shard(
        self, path: str, number: int, shape: tuple[int, ...], dtype: DTypeLike, index: Index
    ) -> dict[str, np.ndarray]:
        """A copy of a slice of the parameter `number`, cast to `dtype`, by its path."""
        values = self.part(number, shape, index)
        self.check_range(values, dtype, index)
        return {path: copied(values, np.dtype(dtype))}  # a view would keep the file mapped

    def blocks(self, number: int, shape: tuple[int, ...], index: Index) -> Blocks:
        """Reads the blocks of a slice of the parameter `number` from a GGUF file."""
        view = self.source.source
        assert isinstance(view, HFView)  # the caller asked for the tensor's format
        assert not self.entry.order  # of architectures that GGUF files do not have here
        index = dataclasses.replace(self.entry, transposed=False).index(number, shape[0], index)
        blocks = view.blocks(self.name, index)
        assert blocks is not None
        for x in (blocks.scales, blocks.offsets):
            problem = None if x is None else find_nonfinite(self.name, x)
            if problem:
                raise NonFiniteError(f"{view.file.path}: scales of {problem}")
        return blocks

    def check_range(self, values: np.ndarray, dtype: DTypeLike, index: Index = ()) -> None:
        """Raises NonFiniteError if casting to float16 would turn a finite weight into infinity."""
        for name, part in self.named(values, index):
            check_range(f"{self.source.info(self.name).file}: {name}", part, dtype)


def sharded_shape(
    path: str, shape: tuple[int, ...], dtype: DTypeLike, mesh: Mesh
) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a parameter."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=parameter_sharding(path, shape, mesh))


def sharded_arrays(
    targets: Mapping[str, jax.ShapeDtypeStruct],
    source_bounds: Callable[[str, Bounds], Bounds],
    read: Callable[[Index], Mapping[str, np.ndarray]],
) -> dict[str, jax.Array]:
    """Makes sharded arrays from one source. Each process reads the parts for its own shards, once.

    Args:
        targets: shapes, dtypes and shardings of the arrays by name.
        source_bounds: the part of the source from which a shard of an array, by name, is made.
        read: reads a part and makes arrays from it. The arrays are whole along an axis that the
            part does not restrict; the shard is cut out of them.
    """
    holders: dict[Bounds, dict[tuple[str, Bounds], list[Any]]] = {}
    for name, like in targets.items():
        for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
            assert index is not None
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, like.shape, strict=True))
            parts = holders.setdefault(source_bounds(name, bounds), {})
            parts.setdefault((name, bounds), []).append(device)
    shards: dict[str, list[jax.Array]] = {name: [] for name in targets}
    for ends, parts in holders.items():
        arrays = read(tuple(slice(*each) for each in ends))
        for (name, bounds), devices in parts.items():
            values = arrays[name]
            for axis, (start, stop) in enumerate(bounds):
                if values.shape[axis] != stop - start:
                    values = values[(*[slice(None)] * axis, slice(start, stop))]
            shards[name] += [jax.device_put(values, device) for device in devices]
        jax.block_until_ready(shards)
    return {
        name: jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards[name])
        for name, like in targets.items()
    }


def check_range(name: str, tensor: np.ndarray, dtype: DTypeLike) -> None:
    """Raises NonFiniteError if casting to float16 would turn a finite weight into infinity."""
    if np.dtype(dtype) == np.float16 and tensor.dtype != np.float16 and tensor.size:
        largest = max(abs(float(tensor.max())), abs(float(tensor.min())))
        if float(np.finfo(np.float16).max) < largest < math.inf:
            raise NonFiniteError(
                f"{name}: holds {largest:g}, which float16 cannot; keep it in bfloat16 or float32"
            )
