"""Reads safetensors: one file, or a folder with one file or several shards and their index.

Tensors are views of a read-only memory map: opening a checkpoint reads its headers only, and a
tensor's bytes are read on access. Pickled weights are never opened.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from jaxllm.checkpoint.safetensors.header import MAX_HEADER_BYTES, parse_header
from jaxllm.checkpoint.source import Index, MappedFile, TensorInfo, WeightSource, find_tensor
from jaxllm.common.errors import CheckpointError, MissingFileError, UnsupportedError, listed, quoted
from jaxllm.common.files import is_there
from jaxllm.common.strict_json import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
OTHER_FORMATS = (*PICKLES, ".h5", ".msgpack")
USE_SAFETENSORS = (
    "jaxllm reads safetensors only, because unpickling a file can run any code in it; convert it "
    "where you trust the file, with transformers: "
    "model.save_pretrained(folder, safe_serialization=True)"
)


class SafetensorsFile(WeightSource):
    """One ``.safetensors`` file.

    Args:
        path: the file.

    Raises:
        MissingFileError: there is no such file.
        CheckpointError: the header is malformed or does not fit the file.
        UnsupportedError: a tensor has a dtype that jaxllm does not read.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        size = self._file.size
        if size < 8:
            raise CheckpointError(f"{self.path}: {size} bytes are too few for a safetensors file")
        length = int.from_bytes(self._file.head(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self.path}: not a safetensors file, or one with a header of {length} bytes; "
                f"at most {MAX_HEADER_BYTES} are read"
            )
        self._start = 8 + length
        if self._start > size:
            raise CheckpointError(f"{self.path}: ends within its header (an incomplete download?)")
        self._entries, self.metadata = parse_header(
            bytes(self._file.head(self._start)[8:]),
            source=str(self.path),
            data_bytes=size - self._start,
        )

    def names(self) -> list[str]:
        return list(self._entries)

    def info(self, name: str) -> TensorInfo:
        entry = find_tensor(self._entries, name, self.path)
        return TensorInfo(entry.shape, entry.dtype, entry.end - entry.begin, self.path)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        entry = find_tensor(self._entries, name, self.path)
        begin = self._start + entry.begin
        if entry.dtype == np.bool_:
            values = self._file.view(np.dtype(np.uint8), begin, entry.end - entry.begin)
            if values.max(initial=0) > 1:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)}: a BOOL is neither 0 nor 1"
                )
        return self._file.array(entry.dtype, begin, entry.shape, index)

    def release_pages(self, name: str) -> None:
        entry = find_tensor(self._entries, name, self.path)
        self._file.release_pages(self._start + entry.begin, self._start + entry.end)

    def close(self) -> None:
        self._file.close()


class ShardedSafetensors(WeightSource):
    """Several safetensors files with a ``model.safetensors.index.json``.

    The index and the shards must agree on every tensor. ``metadata.total_size`` is not checked,
    since writers disagree on what it counts.

    Raises:
        MissingFileError: the index or a shard that it names is missing.
        CheckpointError: the index is malformed, a shard's name is not a plain file name, or a
            tensor is missing, unlisted or in two shards.
    """

    def __init__(self, index: str | PathLike[str]) -> None:
        self.path = Path(index)
        content = read_json(self.path, max_bytes=MAX_HEADER_BYTES, error=CheckpointError)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path}: weight_map must map tensor names to shards")
        for name, shard in weight_map.items():
            if not _is_plain_file_name(shard):
                raise CheckpointError(
                    f"{self.path}: weight_map[{quoted(name)}] is {quoted(shard)}, not the "
                    "plain name of a .safetensors file in the same folder"
                )
        folder = self.path.parent
        missing = sorted({s for s in weight_map.values() if not (folder / s).is_file()})
        if missing:
            raise MissingFileError(
                f"{self.path}: {len(missing)} of the shards it lists are missing: "
                + listed(missing)
            )
        shards = {s: SafetensorsFile(folder / s) for s in dict.fromkeys(weight_map.values())}
        self._shard_of = {name: shards[shard] for name, shard in weight_map.items()}
        self._shards = list(shards.values())
        self._check(weight_map, shards)

    def _check(self, weight_map: dict[str, str], shards: dict[str, SafetensorsFile]) -> None:
        shard_of: dict[str, str] = {}
        for shard, file in shards.items():
            for name in file.names():
                if name in shard_of:
                    raise CheckpointError(
                        f"{self.path}: tensor {quoted(name)} is in {shard_of[name]} and in {shard}"
                    )
                shard_of[name] = shard
        for name in weight_map.keys() | shard_of.keys():
            if weight_map.get(name) != shard_of.get(name):
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} is listed in "
                    f"{weight_map.get(name, 'no shard')} and held by {shard_of.get(name, 'none')}"
                )

    def names(self) -> list[str]:
        return list(self._shard_of)

    def info(self, name: str) -> TensorInfo:
        return find_tensor(self._shard_of, name, self.path).info(name)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        return find_tensor(self._shard_of, name, self.path).read(name, index)

    def release_pages(self, name: str) -> None:
        find_tensor(self._shard_of, name, self.path).release_pages(name)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()


def _is_plain_file_name(name: object) -> bool:
    """True if ``name`` is a file name without a folder, on every operating system.

    Checked without resolving the path, since files in the Hugging Face cache are symbolic links.
    """
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and len(name.encode()) <= 255  # longer than file systems allow
        and not name.startswith((".", "~"))
        and ":" not in name
        and name == PurePosixPath(name).name == PureWindowsPath(name).name
    )


def open_safetensors(path: str | PathLike[str]) -> WeightSource:
    """Opens a checkpoint folder (or one ``.safetensors`` file).

    ``model.safetensors`` takes precedence over ``model.safetensors.index.json``, as in
    transformers.

    Raises:
        MissingFileError: there is no such folder, or no weights in it.
        UnsupportedError: the folder holds weights in other formats only (they are not opened).
        CheckpointError: a file is malformed.
    """
    path = Path(path)
    if path.is_file():
        return SafetensorsFile(path)
    if not path.is_dir():
        raise MissingFileError(f"{path}: no such file or folder")
    if is_there(path / SINGLE, CheckpointError):
        return SafetensorsFile(path / SINGLE)
    if is_there(path / INDEX, CheckpointError):
        return ShardedSafetensors(path / INDEX)
    names = sorted(p.name for p in path.iterdir())
    pickles = [name for name in names if name.lower().endswith(OTHER_FORMATS)]
    if pickles:
        raise UnsupportedError(f"{path} holds only {', '.join(pickles[:5])}: {USE_SAFETENSORS}")
    readable = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    hint = f", only {', '.join(readable[:5])}: name the file to read it" if readable else ""
    raise MissingFileError(
        f"{path}: neither {SINGLE} nor {INDEX} is there{hint}; weights in other formats must be "
        "converted to safetensors first"
    )
