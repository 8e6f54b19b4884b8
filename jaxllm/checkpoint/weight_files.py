"""Opens the weights of a model's folder, in whichever of the known formats they are.

A folder holds one file of weights, or several shards with an index that says which shard holds
each tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
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

FORMATS: Mapping[str, str] = {
    "safetensors": SINGLE,
    "flax": "flax_model.msgpack",
    "pt": "pytorch_model.bin",
}
"""Name of the weight file of each format, in the order of precedence. The keys are the values of
`prefer` of `open_weights`. An index has the name of the file and ``.index.json``."""
WEIGHT_SUFFIXES = tuple(Path(name).suffix for name in FORMATS.values())
"""Suffixes of weight files that `open_weights` opens."""
_INDEX_SUFFIX = ".index.json"
UNREAD_SUFFIXES = (".h5", ".ot", ".pt", ".pth", ".pkl", ".ckpt")
"""Suffixes of weight files, or of other pickled files, that are never opened."""
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
"""Pickled files beside a checkpoint that hold no weights. They are never opened either."""
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")
_T5X_FILE = re.compile(r"(.+\.)?checkpoint(_[0-9]+)?")  # T5X's own test data has a prefix
USE_SAFETENSORS = (
    "jaxllm reads safetensors, flax_model.msgpack and pytorch_model.bin; convert the file where "
    "you trust it, with the library that wrote it (in transformers: "
    "model.save_pretrained(folder, safe_serialization=True))"
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
        weight_map = read_index(self.path, suffix)
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
        self.repeated_bytes = sum(shard.repeated_bytes for shard in self._shards)
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


def read_index(path: Path, suffix: str) -> dict[str, str]:
    """Reads an index: the file name of the shard of each tensor.

    Raises:
        CheckpointError: the file is no index, or a name is not that of a file in the same folder
            with this suffix.
    """
    content = read_json(path, max_bytes=MAX_HEADER_BYTES, error=CheckpointError)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must map tensor names to shards")
    for name, shard in weight_map.items():
        if not is_plain_file_name(shard, suffix):
            raise CheckpointError(
                f"{path}: weight_map[{quoted(name)}] is {quoted(shard)}, not the plain name of a "
                f"{suffix} file in the same folder"
            )
    return weight_map


def is_plain_file_name(name: object, suffix: str) -> bool:
    """True if ``name`` is the name of a file without a folder, on every operating system.

    Checked without resolving the path, since files in the Hugging Face cache are symbolic links.
    """
    return (
        isinstance(name, str)
        and name.endswith(suffix)
        and name not in NO_WEIGHTS
        and name.isprintable()
        and len(name.encode()) <= 255  # longer than file systems allow
        and not name.startswith((".", "~"))
        and ":" not in name
        and name == PurePosixPath(name).name == PureWindowsPath(name).name
    )


def format_of(path: Path) -> str | None:
    """The key in `FORMATS` of a weight file or an index, by its name; None for another file."""
    for key, single in FORMATS.items():
        is_file = path.suffix.lower() == Path(single).suffix and path.name not in NO_WEIGHTS
        if is_file or path.name == single + _INDEX_SUFFIX:
            return key
    return None


def known_names(prefer: str | None = None) -> list[str]:
    """Names of the weight files and indices of a model's folder, in the order of precedence.

    Args:
        prefer: key of the format in `FORMATS` that comes first.
    """
    singles = [FORMATS[key] for key in sorted(FORMATS, key=lambda key: key != prefer)]
    return [name for single in singles for name in (single, single + _INDEX_SUFFIX)]


def weight_files(path: Path, prefer: str | None = None) -> list[Path]:
    """The files that `open_weights` opens: an index and its shards, or one file.

    Empty if the folder has none.
    """
    if path.is_dir():
        found = _present(path, prefer)
        if not found:
            return []
        path = found[0]
    index = _index_of(path)
    if index.name not in known_names() or not index.name.endswith(_INDEX_SUFFIX):
        return [path]
    suffix = Path(index.name.removesuffix(_INDEX_SUFFIX)).suffix
    shards = dict.fromkeys(read_index(index, suffix).values())
    return [index, *(index.with_name(shard) for shard in shards)]


def describe_choice(folder: Path, prefer: str | None = None) -> str | None:
    """Names the weight file that is read and those that are not; None if there is no choice."""
    found = _present(folder, prefer) if folder.is_dir() else []
    if len(found) < 2:
        return None
    first, *others = (path.name for path in found)
    return f"reading the weights from {first}, not from {', '.join(others)}"


def other_files(folder: Path) -> list[Path]:
    """Weight files of a folder in other formats than safetensors, with their indices.

    Shards that no index names are among them.
    """
    others = set(known_names()) - {SINGLE, INDEX}
    return sorted(path for path in folder.iterdir() if _SHARD.sub(r"\1\2", path.name) in others)


def _present(folder: Path, prefer: str | None) -> list[Path]:
    paths = [folder / name for name in known_names(prefer)]
    return [path for path in paths if is_there(path, CheckpointError)]


def _index_of(path: Path) -> Path:
    """The index beside a shard; any other path as it is."""
    shard = _SHARD.fullmatch(path.name)
    index = path if shard is None else path.with_name(shard[1] + shard[2] + _INDEX_SUFFIX)
    return index if index.is_file() else path


def open_weights(path: str | PathLike[str], prefer: str | None = None) -> WeightSource:
    """Opens the weights of a model's folder, or the weight file of a path.

    A folder may hold weights in several formats: safetensors come first, then msgpack, then .bin.
    In each format, a single file takes precedence over an index, as in transformers. The path of a
    shard stands for all shards of its index.

    Args:
        path: the folder, a weight file or an index.
        prefer: key of the format in `FORMATS` to take first.
    """
    path = Path(path)
    if path.is_dir():
        found = _present(path, prefer)
        if not found:
            raise no_weights(path, [each.name for each in path.iterdir()])
        path = found[0]
    elif not path.exists():
        raise MissingFileError(f"{path}: no such file or folder")
    path = _index_of(path)
    key = format_of(path)
    if key is None:
        raise not_opened(path)
    reader, suffix = _reader(key), Path(FORMATS[key]).suffix
    is_index = path.name.endswith(_INDEX_SUFFIX)
    source = ShardedWeights(path, reader, suffix) if is_index else reader(path)
    by_flax = isinstance(source, SafetensorsFile) and source.metadata.get("format") == "flax"
    if key != "flax" and not by_flax:
        return source
    from jaxllm.checkpoint.flax_file import FlaxView  # only such files need this module

    return FlaxView(source)


def _reader(key: str) -> Callable[[Path], WeightSource]:
    """The class of a format's files. Only such files need the module of their class."""
    if key == "flax":
        from jaxllm.checkpoint.flax_file import FlaxFile

        return FlaxFile
    if key == "pt":
        from jaxllm.checkpoint.torch_file import TorchFile

        return TorchFile
    return SafetensorsFile


def not_opened(path: Path) -> UnsupportedError:
    """The error for a file that is no weight file of a known format."""
    is_unread = path.name.lower().endswith((*UNREAD_SUFFIXES, *NO_WEIGHTS))
    advice = USE_SAFETENSORS if is_unread else "give the model's folder, or a weight file in it"
    return UnsupportedError(f"{path} is not a weight file that jaxllm opens: {advice}")


def no_weights(folder: Path | str, names: Collection[str]) -> UnsupportedError | MissingFileError:
    """The error for a folder or repository whose files, of these names, include no weights that
    `open_weights` finds."""
    names = sorted(names)
    unread = [name for name in names if name.lower().endswith(UNREAD_SUFFIXES)]
    readable = [
        name
        for name in names
        if name.lower().endswith((".gguf", *WEIGHT_SUFFIXES)) and name not in NO_WEIGHTS
    ]
    if unread and not readable:
        return UnsupportedError(f"{folder} holds only {listed(unread)}: {USE_SAFETENSORS}")
    hint = f", only {listed(readable)}: give the path of a file to read it" if readable else ""
    single, *others = known_names()
    return MissingFileError(f"{folder}: neither {single} nor {' nor '.join(others)} is there{hint}")


def t5x_in(path: Path) -> Path | None:
    """The file or folder that `jaxllm.checkpoint.t5x.T5XView` opens; None for other checkpoints.

    Args:
        path: a checkpoint of T5X, its msgpack file, or the folder of a run with one checkpoint.

    Raises:
        MissingFileError: the folder has several checkpoints, or one that T5X has not completed.
    """
    if ".tmp-" in path.name or ".orbax-checkpoint-tmp" in path.name:
        raise MissingFileError(
            f"{path}: T5X was interrupted while it wrote this checkpoint; use another one"
        )
    if not os.path.isdir(path):  # False for a name that is too long
        return path if _T5X_FILE.fullmatch(path.name) and os.path.isfile(path) else None
    if _present(path, None):
        return None
    if (path / "checkpoint").is_file():
        return path / "checkpoint"
    if (path / "state" / "_METADATA").is_file():  # written by Orbax
        return path
    steps = sorted(p for p in path.iterdir() if re.fullmatch(r"checkpoint_[0-9]+", p.name))
    if len(steps) > 1:
        names = listed([step.name for step in steps])
        raise MissingFileError(f"{path}: several checkpoints of T5X ({names}); name one of them")
    return t5x_in(steps[0]) if steps else None


def t5x_folders(checkpoint: Path) -> tuple[Path, Path]:
    """The folder of a checkpoint that `t5x_in` found, and the folder of its config.json.

    The latter is the folder of the checkpoint or the one above. T5X itself writes no config.json.
    """
    step = checkpoint.parent if checkpoint.name == "checkpoint" else checkpoint
    folders = [folder for folder in (step, step.parent) if folder.is_dir()]
    found = (folder for folder in folders if os.path.lexists(folder / "config.json"))
    return folders[0], next(found, folders[0])
