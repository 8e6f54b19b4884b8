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
from jaxllm.common.errors import CheckpointError, UnsupportedError, listed, quoted

_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.IGNORECASE)
_PROJECTOR = "the image or audio part of a model; give the file of its language model"
_OTHER_FILES = {
    "adapter": "a LoRA adapter; merge it into its model with llama.cpp's llama-export-lora",
    "imatrix": "an importance matrix, with which llama.cpp quantizes; give the model's file",
    "mmproj": _PROJECTOR,
    "clip": _PROJECTOR,
    "controlvector": "a control vector; give the file of a model",
}
"""Files that are no model, by `general.type`, or by `general.architecture` in older ones."""


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
    kind = str(metadata.get("general.type", "model"))
    key = "general.architecture" if kind == "model" else "general.type"
    what = _OTHER_FILES.get(str(metadata.get(key)))
    if what is not None or kind != "model":
        what = what or "no model; give the file of a model"
        raise UnsupportedError(f"{path}: {key} is {quoted(metadata[key])}: {what}")
    count, number = metadata.get("split.count", 1), metadata.get("split.no", 0)
    return file if count in (0, 1) else _join(file, count, number)


def _join(file: GGUFFile, count: Any, number: Any) -> GGUFFile:
    path, paths = file.path, part_paths(file.path)
    are_numbers = type(count) is int and type(number) is int
    if not are_numbers or len(paths) != count or paths[number : number + 1] != [path]:
        raise CheckpointError(
            f"{path}: split.no is {quoted(number)} and split.count {quoted(count)}, so the file "
            "should be named NAME-00001-of-00003.gguf, with these numbers; rename it and the others"
        )
    part = f"{path}: part {number + 1} of {count} (split.no is {number})"
    missing = [other.name for other in paths if not other.exists()]
    if missing:
        raise CheckpointError(f"{part}; put into its folder what is missing: {listed(missing)}")
    if number != 0:
        raise CheckpointError(f"{part}; give the first part, {paths[0].name}")
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
        for part in parts:
            expected = part.metadata.get("split.tensors.count", len(self._owners))
            if expected != len(self._owners):
                raise CheckpointError(
                    f"{part.path}: split.tensors.count is {quoted(expected)}, but the parts have "
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
