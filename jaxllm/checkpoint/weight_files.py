"""Opens the weights of a model's folder, in whichever of the known formats they are.

A folder holds one file of weights, or several shards with an index that says which shard holds
each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from jaxllm.checkpoint.safetensors import INDEX, MAX_HEADER_BYTES, SINGLE, SafetensorsFile
from jaxllm.checkpoint.source import Index, TensorInfo, WeightSource, find_tensor
from jaxllm.common.errors import (
    CheckpointError,
    MissingFileError,
    UnsupportedError,
    listed,
    quoted,
)
from jaxllm.common.files import is_there, read_json

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
OTHER_FORMATS = (*PICKLES, ".h5", ".msgpack")
USE_SAFETENSORS = (
    "jaxllm reads safetensors only, because unpickling a file can run any code in it; convert it "
    "where you trust the file, with transformers: "
    "model.save_pretrained(folder, safe_serialization=True)"
)


class ShardedWeights(WeightSource):
    """Several weight files of one format, with an index such as ``model.safetensors.index.json``.

    The index and the shards that it names must agree on every tensor. Files that the index does not
    name are not opened: transformers leaves the shards of an earlier save in the folder.
    ``metadata.total_size`` is not checked, since writers disagree on what it counts.

    Args:
        index: the JSON file, beside the shards. Its ``weight_map`` maps the tensors' names, as the
            shards spell them, to the shards' file names.
        open_shard: opens one shard.
        suffix: suffix of the shards' file names, such as ``".safetensors"``.
    """

    def __init__(
        self,
        index: str | PathLike[str],
        open_shard: Callable[[Path], WeightSource],
        suffix: str,
    ) -> None:
        self.path = Path(index)
        content = read_json(self.path, max_bytes=MAX_HEADER_BYTES, error=CheckpointError)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path}: weight_map must map tensor names to shards")
        for name, shard in weight_map.items():
            if not _is_plain_file_name(shard, suffix):
                raise CheckpointError(
                    f"{self.path}: weight_map[{quoted(name)}] is {quoted(shard)}, not the "
                    f"plain name of a {suffix} file in the same folder"
                )
        folder = self.path.parent
        missing = sorted({s for s in weight_map.values() if not (folder / s).is_file()})
        if missing:
            raise MissingFileError(
                f"{self.path}: {len(missing)} of the shards it lists are missing: "
                + listed(missing)
            )
        shards = {s: open_shard(folder / s) for s in dict.fromkeys(weight_map.values())}
        self._shard_of = {name: shards[shard] for name, shard in weight_map.items()}
        self._shards = list(shards.values())
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


def _is_plain_file_name(name: object, suffix: str) -> bool:
    """True if ``name`` is a file name without a folder, on every operating system.

    Checked without resolving the path, since files in the Hugging Face cache are symbolic links.
    """
    return (
        isinstance(name, str)
        and name.endswith(suffix)
        and name.isprintable()
        and len(name.encode()) <= 255  # longer than file systems allow
        and not name.startswith((".", "~"))
        and ":" not in name
        and name == PurePosixPath(name).name == PureWindowsPath(name).name
    )


@dataclass(frozen=True)
class WeightFormat:
    """A format that the weights in a model's folder may have.

    Attributes:
        names: names of the file and of the index of shards, in the order of precedence.
        open_file: opens a file of the format.
        open_index: opens the shards that an index lists.
    """

    names: tuple[str, str]
    open_file: Callable[[Path], WeightSource]
    open_index: Callable[[Path], WeightSource]

    @property
    def suffix(self) -> str:
        return Path(self.names[0]).suffix


def _open_safetensors_index(path: Path) -> WeightSource:
    return ShardedWeights(path, SafetensorsFile, ".safetensors")


# In the order of precedence. The key is what `prefer` of `open_weights` names.
FORMATS: Mapping[str, WeightFormat] = {
    "safetensors": WeightFormat((SINGLE, INDEX), SafetensorsFile, _open_safetensors_index),
}


def weight_files(folder: Path, prefer: str | None = None) -> list[Path]:
    """The files or indices of a folder that `open_weights` can open, the one it takes first."""
    formats = sorted(FORMATS, key=lambda name: name != prefer)
    paths = [folder / name for format_ in formats for name in FORMATS[format_].names]
    return [path for path in paths if is_there(path, CheckpointError)]


def open_weights(path: str | PathLike[str], prefer: str | None = None) -> WeightSource:
    """Opens the weights of a checkpoint's folder, or one weight file.

    In each format, a single file takes precedence over an index, as in transformers.

    Args:
        path: the folder or the file.
        prefer: key of the format in `FORMATS` to take if the folder has weights in several.
    """
    path = Path(path)
    if path.is_dir():
        found = weight_files(path, prefer)
        if not found:
            raise _no_weights(path)
        path = found[0]
    elif not path.exists():
        raise MissingFileError(f"{path}: no such file or folder")
    for format_ in FORMATS.values():
        if path.name == format_.names[1]:
            return format_.open_index(path)
        if path.suffix.lower() == format_.suffix:
            return format_.open_file(path)
    raise UnsupportedError(f"{path} is not a weight file that jaxllm opens: {USE_SAFETENSORS}")


def _no_weights(folder: Path) -> UnsupportedError | MissingFileError:
    """The error for a folder without weights of a known format and name."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.lower().endswith(OTHER_FORMATS)]
    if pickles:
        return UnsupportedError(f"{folder} holds only {', '.join(pickles[:5])}: {USE_SAFETENSORS}")
    readable = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    hint = f", only {', '.join(readable[:5])}: name the file to read it" if readable else ""
    return MissingFileError(
        f"{folder}: neither {SINGLE} nor {INDEX} is there{hint}; weights in other formats must be "
        "converted to safetensors first"
    )
