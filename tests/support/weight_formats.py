"""Checkpoints in the formats of other libraries, made of a folder of safetensors."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax_bytes import packed

from jaxllm.checkpoint.weight_files import known_names, open_weights

FLAX = "flax_model.msgpack"
TORCH = "pytorch_model.bin"
_STORAGES = {"float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long"}


def copied(folder: Path, target: Path) -> dict[str, np.ndarray]:
    """Copies a checkpoint without its weights; returns its tensors."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*known_names()))
    with open_weights(folder) as source:
        return {name: source.read(name) for name in source.names()}


def flax_tree(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A tree as of a Flax class, but that every matrix is a kernel, also embeddings."""
    tree: dict[str, Any] = {}
    for name, values in tensors.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if last == "weight" and values.ndim == 2:
            node["kernel"] = np.ascontiguousarray(values.T)
        else:
            node["scale" if last == "weight" else last] = values
    return tree


def write_flax(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes flax_model.msgpack."""
    (folder / FLAX).write_bytes(packed(flax_tree(tensors)))


def write_flax_shards(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes three shards and their index; the first shard is empty, and the index lacks it."""
    shards = [f"flax_model-0000{number}-of-00003.msgpack" for number in (1, 2, 3)]
    names = sorted(tensors)
    parts = [[], names[::2], names[1::2]]
    weight_map = {}
    for shard, part in zip(shards, parts, strict=True):
        tree = flax_tree({name: tensors[name] for name in part})
        (folder / shard).write_bytes(packed(tree))
        weight_map |= dict.fromkeys(paths(tree), shard)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{FLAX}.index.json").write_text(json.dumps(index))


def paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of the arrays of a nested map, joined by "/"."""
    found = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found += paths(value, path + "/") if isinstance(value, Mapping) else [path]
    return found


def write_torch(folder: Path, tensors: Mapping[str, np.ndarray], name: str = TORCH) -> None:
    """Writes a file of torch.save. Names of the same array share a storage, as of tied weights."""
    keys: dict[int, str] = {}
    pickled = b"\x80\x02}("  # protocol 2, and a dict whose items follow
    for tensor, values in tensors.items():
        key = keys.setdefault(id(values), str(len(keys)))
        strides = np.empty(values.shape, np.int8).strides  # one byte a value
        kind = f"ctorch\n{_STORAGES[values.dtype.name]}Storage\n".encode()
        storage = b"(" + _text("storage") + kind + _text(key) + _text("cpu")
        storage += _numbers([values.size]) + b"tQ"
        sizes = b"(" + _numbers(values.shape) + b"t(" + _numbers(strides) + b"t"
        hooks = b"\x89ccollections\nOrderedDict\n)R"
        rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n("
        pickled += _text(tensor) + rebuild + storage + _numbers([0]) + sizes + hooks + b"tR"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("archive/data.pkl", pickled + b"u.")
        for array in {id(values): values for values in tensors.values()}.values():
            archive.writestr(f"archive/data/{keys[id(array)]}", array.tobytes())
        archive.writestr("archive/version", "3\n")


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _numbers(numbers: Sequence[int]) -> bytes:
    return b"".join(b"J" + struct.pack("<i", number) for number in numbers)


def write_torch_shards(folder: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes two shards and their index."""
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"pytorch_model-0000{number}-of-00002.bin"
        write_torch(folder, {name: tensors[name] for name in part}, shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / f"{TORCH}.index.json").write_text(json.dumps({"weight_map": weight_map}))
