"""Presents the tensors of a layer's experts as one: files have a tensor for each expert, a model
has the stack of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxllm.checkpoint.source import Index, TensorInfo, WeightSource, aligned_empty
from jaxllm.common.errors import CheckpointError
from jaxllm.models.weights import tensors_of


class StackedTensors(WeightSource):
    """View of a weight file in which some tensors are stacked along a new first axis.

    A stack whose tensors are not all in the file is left out; its tensors have their own names.
    """

    def __init__(self, source: WeightSource, counts: Mapping[str, int]) -> None:
        """
        Args:
            counts: number of tensors of each stack by its name, which has ``{e}`` for the number
                of a tensor. Names that the file itself has (GGUF) are left as they are.
        """
        self.source = source
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
