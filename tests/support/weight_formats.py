"""Checkpoints in the formats of other libraries, made of a folder of safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax_bytes import packed

from jaxllm.checkpoint.weight_files import known_names, open_weights

FLAX = "flax_model.msgpack"


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
