"""The interface of every weight file: names, shapes and arrays on demand.

:class:`~jaxllm.checkpoint.safetensors.reader.SafetensorsFile`, its sharded sibling and
:class:`~jaxllm.checkpoint.gguf.reader.GGUFFile` implement :class:`WeightSource`, so that a loader
knows no file format.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np

from jaxllm.common.errors import CheckpointError, MissingFileError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Index = tuple[slice, ...]
"""A part of an array: a slice of each dimension, with steps of 1. Empty: all of it."""

_CHUNK = 1 << 20  # values that find_nonfinite looks at in one go: small enough for the CPU's cache


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a weight file, as its header describes it.

    Attributes:
        shape: The shape of the array that :meth:`WeightSource.read` returns.
        dtype: The dtype of that array (``ml_dtypes.bfloat16`` included).
        nbytes: Bytes that the tensor takes in the file: fewer than the array where it is quantised.
        file: The file that holds it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int
    file: Path


class WeightSource(Protocol):
    """Read access to named tensors; a context manager that closes itself."""

    def names(self) -> list[str]:
        """The tensors' names, in the file's order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype, size and file of one tensor, without reading it.

        Raises:
            CheckpointError: No tensor has this name.
        """
        ...

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """One tensor or a part of it, read-only or owned by the caller.

        Where the file stores the array as numpy would, it is a view of a read-only memory map and
        stays valid after :meth:`close`; the file must not be changed meanwhile. Only this tensor's
        bytes are ever touched, and of a part as few as the format allows.

        Raises:
            CheckpointError: No tensor has this name, or the source is closed.
        """
        ...

    def forget(self, name: str) -> None:
        """Give back the memory that looking at a tensor of the file took; it can be read again."""
        ...

    def close(self) -> None:
        """Let go of the files; arrays already read stay valid."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MappedFile:
    """A whole file as a read-only memory map that gives numpy views."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise MissingFileError(f"{path}: no such file")
        try:
            with path.open("rb") as file:
                if path.stat().st_size == 0:  # which mmap cannot map
                    raise CheckpointError(f"{path}: the file is empty")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as failure:
            raise CheckpointError(f"{path}: cannot be read ({failure.strerror})") from failure
        self.size = len(mapped)
        self._map: mmap.mmap | None = mapped

    def view(self, dtype: np.dtype[Any], begin: int, count: int) -> np.ndarray:
        """``count`` values from byte ``begin`` on, flat; a copy only where they lie unaligned."""
        if self._map is None:
            raise CheckpointError(f"{self.path}: read after close()")
        if count == 0:  # numpy refuses an empty view at the very end of a buffer
            return np.empty(0, dtype)
        array = np.frombuffer(self._map, dtype, count, begin)
        return array if array.flags.aligned else array.copy()

    def array(
        self, dtype: np.dtype[Any], begin: int, shape: tuple[int, ...], index: Index = ()
    ) -> np.ndarray:
        """An array in C order, or a part of it; a copy (of the part) only where it is unaligned."""
        if self._map is None:
            raise CheckpointError(f"{self.path}: read after close()")
        count = math.prod(shape)
        flat = np.frombuffer(self._map, dtype, count, begin) if count else np.empty(0, dtype)
        part = flat.reshape(shape)
        part = part[index] if index else part
        return part if part.flags.aligned else part.copy()

    def forget(self, begin: int, end: int) -> None:
        """Give the memory of these bytes back to the system, which reads them again if need be."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)

    def head(self, limit: int) -> memoryview:
        """The first ``limit`` bytes, or all of a shorter file, without a copy."""
        return self.view(np.dtype(np.uint8), 0, min(self.size, limit)).data

    def close(self) -> None:
        self._map = None  # unmapped when the last array that views it is gone


def find_nonfinite(name: str, array: np.ndarray) -> str | None:
    """Look for NaN and infinity: ``None`` where all is finite, else a sentence that says where.

    Works through a million values at a time, so it needs no memory to speak of; 16-bit floats are
    tested by their exponent bits, which is several times faster than converting them.

    >>> find_nonfinite("w", np.ones(4, np.float32)) is None
    True
    >>> find_nonfinite("w", np.array([1, np.inf], np.float16))
    'w: 1 of 2 values are NaN or infinite, the first is inf'
    """
    exponent = {np.dtype(np.float16): 0x7C00, BFLOAT16: 0x7F80}.get(array.dtype)
    if exponent is None and not np.issubdtype(array.dtype, np.floating):
        return None
    flat = array.ravel(order="K")  # a view of a transposed array too
    count, first = 0, None
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        if exponent is None:
            bad = ~np.isfinite(chunk)
        else:
            bad = chunk.view(np.uint16) & np.uint16(exponent) == exponent
        found = int(np.count_nonzero(bad))
        if found and first is None:
            first = float(chunk[int(np.argmax(bad))])
        count += found
    if count == 0:
        return None
    return f"{name}: {count} of {flat.size} values are NaN or infinite, the first is {first}"


def quoted(name: str) -> str:
    """A name from a file, fit for one line of an error message."""
    return repr(name if len(name) <= 120 else f"{name[:117]}...")
