"""Opens GGUF files of models, and joins the parts of a split one.

llama.cpp splits a large file into ``NAME-00001-of-00003.gguf`` and so on. The first part has the
metadata, each has some of the tensors.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.gguf.reader import Blocks, GGUFFile
from jaxllm.checkpoint.source import Index, TensorInfo, find_tensor
from jaxllm.common.errors import CheckpointError, UnsupportedError, quoted

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.IGNORECASE)
_OTHER_FILES = {
    "adapter": "a LoRA adapter; merge it into its model with llama.cpp's llama-export-lora",
    "imatrix": "an importance matrix, with which llama.cpp quantizes; give the model's file",
    "mmproj": "the image or audio part of a model; give the file of its language model",
}
"""Files that are no model, by `general.type`."""


def part_paths(path: Path) -> list[Path]:
    """All parts of the file that `path` is a part of, by its name; otherwise the path alone."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 < int(match[3]) <= 9999:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{n:05}-of-{match[3]}.gguf") for n in range(1, count + 1)]


def open_gguf(path: str | PathLike[str]) -> GGUFFile:
    """Opens the GGUF file of a model; for the first part of a split one, all parts.

    Raises:
        UnsupportedError: the file is an adapter, an importance matrix or the like.
        CheckpointError: the file is a later part, or parts are missing or contradict each other.
    """
    path = Path(path)
    file = GGUFFile(path)
    metadata = file.metadata
    count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if count not in (0, 1):
        return _join(file, count, number)
    kind = metadata.get("general.type", "model")
    if kind != "model":
        what = _OTHER_FILES.get(str(kind), "no model; give the file of a model")
        raise UnsupportedError(f"{path}: general.type is {quoted(kind)}: {what}")
    return file


def _join(file: GGUFFile, count: Any, number: Any) -> GGUFFile:
    path, paths = file.path, part_paths(file.path)
    if type(count) is not int or type(number) is not int or len(paths) != count:
        raise CheckpointError(
            f"{path}: split.no is {quoted(number)} and split.count {quoted(count)}, so the file "
            "should be named NAME-00001-of-00003.gguf, with these numbers; rename it and the others"
        )
    if number != 0:
        raise CheckpointError(
            f"{path}: split.no is {number}: part {number + 1} of {count}; give the first part, "
            f"{paths[0].name}, with the others in its folder"
        )
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise CheckpointError(
            f"{path}: the first of {count} parts, of which {missing[0]} is missing in its folder"
        )
    return SplitGGUF(path, [file, *map(GGUFFile, paths[1:])])


class SplitGGUF(GGUFFile):
    """A GGUF file in parts, as one file with the metadata of the first."""

    def __init__(self, path: Path, parts: list[GGUFFile]) -> None:
        self.path, self.metadata = path, parts[0].metadata
        self.size = sum(part.size for part in parts)
        self._parts, self._owners = parts, dict[str, GGUFFile]()
        for number, part in enumerate(parts):
            found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
            if found != (number, len(parts)):
                raise CheckpointError(
                    f"{part.path}: split.no and split.count are {quoted(list(found))}, not "
                    f"[{number}, {len(parts)}]: it is a part of another file"
                )
            for name in part.tensors:
                if name in self._owners:
                    raise CheckpointError(
                        f"{part.path}: the tensor {quoted(name)} is also in "
                        f"{self._owners[name].path.name}"
                    )
                self._owners[name] = part
        expected = self.metadata.get("split.tensors.count", len(self._owners))
        if expected != len(self._owners):
            raise CheckpointError(
                f"{path}: split.tensors.count is {quoted(expected)}, but the parts have "
                f"{len(self._owners)} tensors"
            )
        self.tensors = {name: part.tensors[name] for name, part in self._owners.items()}

    def _owner(self, name: str) -> GGUFFile:
        return find_tensor(self._owners, name, self.path)

    def info(self, name: str) -> TensorInfo:
        return self._owner(name).info(name)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        return self._owner(name).read(name, index)

    def blocks(self, name: str, index: Index = ()) -> Blocks | None:
        return self._owner(name).blocks(name, index)

    def release_pages(self, name: str) -> None:
        self._owner(name).release_pages(name)

    def close(self) -> None:
        for part in self._parts:
            part.close()
