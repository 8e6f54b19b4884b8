"""Interface of weight files, `WeightSource`: tensor names, shapes, and arrays on demand.

:class:`~jaxllm.checkpoint.safetensors.SafetensorsFile`, the sharded reader and
:class:`~jaxllm.checkpoint.gguf.reader.GGUFFile` implement it, so that the loader does not
depend on file formats.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxllm.common.errors import (
    CheckpointError,
    NonFiniteError,
    UnsupportedError,
    naming_file,
    quoted,
)
from jaxllm.common.files import check_is_file, check_not_placeholder
from jaxllm.common.hardware import default_device

T = TypeVar("T")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
"""Dtypes that models compute in."""

Index = tuple[slice, ...]
"""One slice per dimension, with step 1. Empty: the whole array."""

ROOM = 512 << 20
"""Bytes that tensors may have together beyond twice their file, whose bytes they may repeat."""

XLA_ALIGNMENT = 64
_CHUNK = 1 << 20  # values per pass of find_nonfinite: they fit into the CPU's cache
_BLOCK = 256  # rows and columns that copy_in_blocks copies at a time
_BLOCK_PADDING = 16


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a weight file, as its header describes it.

    Attributes:
        shape: the shape of the array that :meth:`WeightSource.read` returns.
        dtype: the dtype of that array (``ml_dtypes.bfloat16`` included).
        nbytes: bytes of the tensor in the file: fewer than the array's where it is quantized.
        file: the file that holds it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    file: Path


class WeightSource(Protocol):
    """Read access to named tensors; a context manager.

    Attributes:
        from_flax: True if one of transformers' Flax classes wrote the weights.
        repeated_bytes: bytes of the files, if several tensors may be made of the same bytes; 0 in
            other formats.
    """

    from_flax: bool = False
    repeated_bytes: int = 0

    def names(self) -> list[str]:
        """Tensor names, in the file's order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype, size and file of one tensor, without reading it."""
        ...

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor or a slice of it; the array is read-only or owned by the caller.

        If the file stores the array in numpy's layout, the result is a view of a read-only memory
        map and stays valid after :meth:`close`; the file must not change meanwhile. A view may be
        transposed and need not be aligned: `copy_in_blocks` copies any view fast. Reads only
        the requested bytes, or as few as the format allows.
        """
        ...

    def release_pages(self, name: str) -> None:
        """Releases the pages that reading a tensor mapped; it can be read again."""
        ...

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of config.json, with the fields that this kind of weight file decides."""
        return dict(config)

    def close(self) -> None:
        """Closes the files; arrays already read stay valid."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_tensor(tensors: Mapping[str, T], name: str, file: Path) -> T:
    """The entry of a tensor; raises CheckpointError if the file has no tensor of this name."""
    try:
        return tensors[name]
    except KeyError:
        raise CheckpointError(f"{file}: no tensor is named {quoted(name)}") from None


def check_repetitions(source: WeightSource, names: Collection[str]) -> None:
    """Checks the bytes of the tensors that are kept in memory together.

    Raises:
        CheckpointError: they repeat the bytes of a file many times.
    """
    total = sum(source.info(name).nbytes for name in names)
    if source.repeated_bytes and total > 2 * source.repeated_bytes + ROOM:
        raise CheckpointError(
            f"{source.info(next(iter(names))).file}: the parameters have {total} bytes together, "
            f"and the weight files have {source.repeated_bytes} bytes; at most twice as many and "
            f"{ROOM} bytes are read"
        )


def read_tensor(source: WeightSource, name: str) -> np.ndarray:
    """Reads a tensor; checks that it is finite and of a float dtype."""
    info = source.info(name)
    if info.dtype not in FLOATS:
        raise UnsupportedError(
            f"{info.file}: {quoted(name)} is {info.dtype}; expected float32, bfloat16 or float16"
        )
    tensor = source.read(name)
    problem = find_nonfinite(name, tensor)
    if problem:
        raise NonFiniteError(f"{info.file}: {problem}")
    return tensor


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: the array that it is read as, and its bytes in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class MappedFile(WeightSource):
    """A weight file as a read-only memory map with numpy views.

    Attributes:
        path: the file.
        tensors: a `StoredTensor` for each tensor, by name in the file's order.
    """

    tensors: Mapping[str, Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        check_is_file(path)
        with naming_file(path, CheckpointError, "read"), path.open("rb") as file:
            if path.stat().st_size == 0:  # mmap refuses empty files
                raise CheckpointError(f"{path}: the file is empty")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.size = len(mapped)
        self._map: mmap.mmap | None = mapped
        check_not_placeholder(path, mapped[:2048], CheckpointError)

    def array(
        self, dtype: np.dtype[Any], begin: int, shape: tuple[int, ...], index: Index = ()
    ) -> np.ndarray:
        """A view of the array that begins at byte ``begin``, in C order, or of a slice of it.

        It is a copy only if it is not aligned.
        """
        values = self.view(dtype, begin, shape)
        values = values[index] if index else values
        return values if values.flags.aligned else values.copy()

    def view(
        self,
        dtype: np.dtype[Any],
        begin: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
    ) -> np.ndarray:
        """A view of the array that begins at byte ``begin``, aligned or not.

        Args:
            strides: bytes from an element to the next of each axis; None: in C order.
        """
        if self._map is None:
            raise CheckpointError(f"{self.path}: read after close()")
        if 0 in shape:  # numpy refuses an empty view at the very end of a buffer
            return np.empty(shape, dtype)
        return np.ndarray(shape, dtype, self._map, begin, strides)

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        entry: StoredTensor = find_tensor(self.tensors, name, self.path)
        return TensorInfo(entry.shape, entry.dtype, entry.nbytes, self.path)

    def release_pages(self, name: str) -> None:
        entry: StoredTensor = find_tensor(self.tensors, name, self.path)
        self.release_range(entry.begin, entry.end)

    def release_range(self, begin: int, end: int) -> None:
        """Releases the mapped pages of a range of bytes; they can be read again."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def head(self, limit: int) -> memoryview:
        """The first ``limit`` bytes, or all of a shorter file, without a copy."""
        return self.array(np.dtype(np.uint8), 0, (min(self.size, limit),)).data

    def close(self) -> None:
        self._map = None  # unmapped when the last array that views it is gone


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An uninitialized array that `jax.device_put` takes over on a CPU without copying it.

    XLA copies arrays that are not aligned, as NumPy's own are not.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + XLA_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % XLA_ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def copy_in_blocks(target: np.ndarray, values: np.ndarray) -> None:
    """Copies values into an array of the same shape, cast to its dtype.

    A matrix whose rows are columns of the target in memory is copied in blocks that fit into the
    CPU's cache, several times faster than NumPy copies it. Each block goes through a buffer, since
    the rows of a matrix whose width is a power of two share few lines of the cache.
    """
    orders = {x.strides[0] < x.strides[1] for x in (target, values) if x.ndim == 2}
    if len(orders) < 2:
        np.copyto(target, values, casting="unsafe")
        return
    if target.strides[0] < target.strides[1]:
        target, values = target.T, values.T
    buffer = np.empty((_BLOCK, _BLOCK + _BLOCK_PADDING), values.dtype)
    rows, columns = values.shape
    for i in range(0, rows, _BLOCK):
        for j in range(0, columns, _BLOCK):
            block = values[i : i + _BLOCK, j : j + _BLOCK].T
            part = buffer[: block.shape[0], : block.shape[1]]
            part[...] = block
            np.copyto(target[i : i + _BLOCK, j : j + _BLOCK], part.T, casting="unsafe")


def find_nonfinite(name: str, array: np.ndarray) -> str | None:
    """Looks for NaN and infinity: ``None`` if all is finite, else a sentence with count and value.

    Reads a million values at a time, so that it needs little memory. 16-bit floats are tested by
    their exponent bits, which is several times faster than converting them.

    >>> find_nonfinite("w", np.ones(4, np.float32)) is None
    True
    >>> find_nonfinite("w", np.array([1, np.inf], np.float16))
    'w: 1 of 2 values are NaN or infinite, the first is inf'
    """
    exponent = {np.dtype(np.float16): 0x7C00, BFLOAT16: 0x7F80}.get(array.dtype)
    if exponent is None and not np.issubdtype(array.dtype, np.floating):
        return None
    count, first_value = 0, None
    for chunk in _chunks(array):
        if exponent is None:
            bad = ~np.isfinite(chunk)
        else:
            bad = chunk.view(np.uint16) & np.uint16(exponent) == exponent
        found = int(np.count_nonzero(bad))
        if found and first_value is None:
            first_value = float(chunk[int(np.argmax(bad))])
        count += found
    if count == 0:
        return None
    return f"{name}: {count} of {array.size} values are NaN or infinite, the first is {first_value}"


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The values of an array in pieces of at most `_CHUNK`, in the order of memory."""
    if array.flags.forc:
        flat = array.ravel(order="K")  # a view
        yield from (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
    else:
        flags = ("external_loop", "buffered", "zerosize_ok")
        pieces: Any = np.nditer(array, flags, order="K", buffersize=_CHUNK)
        yield from pieces


def float_dtype(name: str, value: DTypeLike | None) -> np.dtype | None:
    """Converts a dtype argument to a numpy dtype; None stays None."""
    if value is None:
        return None
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)  # which have a dtype
    try:
        dtype = None if is_array else jnp.dtype(value)
    except (TypeError, ValueError, SyntaxError):  # text that is no Unicode, thousands of digits
        dtype = None
    if dtype not in FLOATS:
        raise UnsupportedError(
            f"{name}: expected float32, bfloat16 or float16, found {quoted(value)}"
        )
    return dtype


def default_dtype(dtypes: Sequence[np.dtype], platform: str | None = None) -> np.dtype:
    """Compute dtype for weights of these dtypes: the most common, but float32 on a CPU.

    XLA converts half-precision weights on every use on a CPU, which is about five times slower.

    Args:
        platform: of the devices; None: JAX's default.
    """
    if (platform or default_device().platform) == "cpu":
        return np.dtype(np.float32)
    return max(set(dtypes), key=dtypes.count)
