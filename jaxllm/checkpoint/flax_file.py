"""Reads the weights that transformers' Flax classes wrote, and presents them under torch's names.

``flax_model.msgpack`` is a nested map of arrays (:mod:`jaxllm.checkpoint.msgpack`). Large models
have shards of it with an index, or ``model.safetensors`` with the metadata ``format: flax``, whose
names are the map's keys joined by dots. Flax calls the last key ``kernel``, ``scale`` or
``embedding`` where torch says ``weight``, and every kernel is the transpose of torch's tensor. This
holds for GPT-2 too, whose tensors are [in, out] in torch and [out, in] in Flax. No other array
differs, so no table of model families is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path

import numpy as np

from jaxllm.checkpoint.msgpack import StoredArray, flattened, read_msgpack
from jaxllm.checkpoint.source import (
    Index,
    MappedFile,
    TensorInfo,
    WeightSource,
    aligned_empty,
    copy_in_blocks,
    find_tensor,
)
from jaxllm.common.errors import CheckpointError, quoted

_KERNEL = "kernel"
_WEIGHTS = (_KERNEL, "scale", "embedding")
"""Last parts of Flax's names whose tensor torch calls ``weight``."""


class FlaxFile(MappedFile):
    """One ``.msgpack`` file of a Flax class; opening it reads the headers of the arrays only.

    Names are the keys that lead to an array, joined by "/". Arrays are views of the file that are
    mostly not aligned, since their bytes begin anywhere. An array of more than 2**30 bytes is
    stored in chunks, which are copied into one array.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(Path(path))
        tree = read_msgpack(self.head(self.size), source=str(self.path))
        if not isinstance(tree, dict):
            raise CheckpointError(
                f"{self.path}: not a checkpoint of Flax: it holds {quoted(type(tree).__name__)} "
                "instead of a map of parameters"
            )
        self.tensors = flattened(tree, str(self.path))
        for name, leaf in self.tensors.items():
            if not isinstance(leaf, StoredArray):
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} is a value of type {type(leaf).__name__}, "
                    "not an array; parameters are arrays in nested maps"
                )
        self.release_range(0, self.size)  # a header may have mapped megabytes around it

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads an array or a slice of it. A kernel in chunks is in Fortran order, so that its
        transpose, as torch has it, is in C order."""
        entry: StoredArray = find_tensor(self.tensors, name, self.path)
        if len(entry.pieces) == 1:
            values = self.view(entry.dtype, entry.begin, entry.shape)
            return values[index] if index else values
        rows, *rest = (*index, *[slice(None)] * (len(entry.shape) - len(index)))
        first, stop, _ = rows.indices(entry.shape[0])
        sizes = [len(range(*s.indices(n))) for s, n in zip(rest, entry.shape[1:], strict=True)]
        shape = (max(stop - first, 0), *sizes)
        is_turned = _is_kernel(name, len(entry.shape))
        result = aligned_empty(shape[::-1] if is_turned else shape, entry.dtype)
        result = result.T if is_turned else result
        for begin, end, part in self._row_ranges(entry, first, stop):
            copy_in_blocks(result[begin - first : end - first], part[(slice(None), *rest)])
        return result

    def _row_ranges(
        self, entry: StoredArray, first: int, stop: int
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """First row, end and values of ranges of rows that lie in one chunk each. A row that lies
        in several chunks is a range of its own, and a copy."""
        width = math.prod(entry.shape[1:])
        cuts, reached = {first, stop}, 0
        for begin, end in entry.pieces:
            reached += (end - begin) // entry.dtype.itemsize
            cuts |= {reached // width, -(-reached // width)}
        ordered = sorted(row for row in cuts if first <= row <= stop)
        for begin, end in itertools.pairwise(ordered):
            values = self._flat(entry, begin * width, end * width)
            yield begin, end, values.reshape(-1, *entry.shape[1:])

    def _flat(self, entry: StoredArray, first: int, stop: int) -> np.ndarray:
        """The elements from `first` to `stop` of an array in chunks; a view if one has them all."""
        parts: list[np.ndarray] = []
        reached = 0
        for begin, end in entry.pieces:
            count = (end - begin) // entry.dtype.itemsize
            chunk = self.view(entry.dtype, begin, (count,))
            part = chunk[max(first - reached, 0) : max(stop - reached, 0)]
            parts += [part] if part.size else []
            reached += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _is_kernel(name: str, axes: int) -> bool:
    """True for a matrix that is the transpose of torch's tensor."""
    return axes == 2 and _parts(name)[1] == _KERNEL


def _parts(name: str) -> tuple[str, str]:
    """The name of a parameter's module, with dots, and the parameter's own name."""
    module, _, last = name.replace("/", ".").rpartition(".")
    return module, last


def torch_name(name: str) -> str:
    """The name that torch has for one of Flax's, whose parts are joined by "/" or by dots.

    >>> torch_name("transformer/h/0/attn/c_attn/kernel"), torch_name("final_logits_bias")
    ('transformer.h.0.attn.c_attn.weight', 'final_logits_bias')
    """
    module, last = _parts(name)
    last = "weight" if module and last in _WEIGHTS else last
    return f"{module}.{last}" if module else last


class FlaxView(WeightSource):
    """View of a source with Flax's names and layout under torch's names and in torch's layout.

    Transposed tensors are views in Fortran order. Closing the view closes the source.

    Args:
        source: a :class:`FlaxFile`, its shards, or a safetensors file that a Flax class wrote.
    """

    from_flax = True

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self._file = Path()
        # Flax's name of each tensor, and whether it is stored as the tensor's transpose.
        self._stored: dict[str, tuple[str, bool]] = {}
        for flax_name in source.names():
            name, info = torch_name(flax_name), source.info(flax_name)
            where = f"{info.file}: tensor {quoted(flax_name)}"
            if name in self._stored:
                other = quoted(self._stored[name][0])
                raise CheckpointError(f"{where} and {other} are both {quoted(name)} in torch")
            if _parts(flax_name)[1] == _KERNEL and len(info.shape) == 3:
                raise CheckpointError(
                    f"{where} has shape {list(info.shape)}, and a kernel has two axes. If the "
                    f"parameters were saved once for each of {info.shape[0]} devices, save "
                    "flax.jax_utils.unreplicate(params) instead"
                )
            self._file = info.file
            self._stored[name] = flax_name, _is_kernel(flax_name, len(info.shape))

    def names(self) -> list[str]:
        return list(self._stored)

    def info(self, name: str) -> TensorInfo:
        flax_name, is_turned = find_tensor(self._stored, name, self._file)
        info = self.source.info(flax_name)
        return replace(info, shape=info.shape[::-1]) if is_turned else info

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        flax_name, is_turned = find_tensor(self._stored, name, self._file)
        if not is_turned:
            return self.source.read(flax_name, index)
        rows, columns = (*index, *[slice(None)] * (2 - len(index)))
        return self.source.read(flax_name, (columns, rows)).T

    def release_pages(self, name: str) -> None:
        self.source.release_pages(find_tensor(self._stored, name, self._file)[0])

    def close(self) -> None:
        self.source.close()
