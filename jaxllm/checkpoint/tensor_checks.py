"""Checks of a checkpoint's tensors against the model, before any memory is allocated."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.source import FLOATS, WeightSource
from jaxllm.common.errors import CheckpointError, UnsupportedError, listed
from jaxllm.models.config import ModelConfig
from jaxllm.models.registry import ModelSpec
from jaxllm.models.rotary_decoder import RotaryConfig
from jaxllm.models.weights import Entry, Table


def lacks_prefix(table: Table, names: list[str]) -> bool:
    """True if the file holds the base model only, so that tensor names lack the prefix."""
    return bool(table.prefix) and not any(name.startswith(table.prefix) for name in names)


def tensor_name(entry: Entry, table: Table, stripped: bool) -> str:
    """Name of an entry's tensor in the file."""
    return entry.tensor.removeprefix(table.prefix) if stripped else entry.tensor


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compares shapes, dtypes and bytes: -0 differs from 0, and a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = f"u{a.itemsize}"
    return bool((a.view(bits) == b.view(bits)).all())


def check_depth(spec: ModelSpec, source: WeightSource, where: Path) -> None:
    """Raises CheckpointError if the config has more layers than the file has tensors."""
    tensors = len(source.names())
    for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        layers = getattr(spec.config, name, None) or 0
        if layers > tensors:
            raise CheckpointError(
                f"{where}: {name}: {layers}, but there are only {tensors} tensors in the weights"
            )


_NEW_HEAD = (
    ". For a classifier with a new head, load the language model and call "
    "jaxllm.training.with_classifier(model, num_labels=...)"
)


def check_parameter_names(
    entries: Mapping[str, Entry],
    expected: Mapping[str, Any],
    spec: ModelSpec,
    source: WeightSource,
) -> tuple[tuple[str, str], ...]:
    """Checks the tensors' names against the model.

    Args:
        entries: entry of the weight table for each tensor that the model needs.
        expected: the model's parameters by path.

    Returns:
        (tensor name, our path) of the tensors that duplicate another one.

    Raises:
        CheckpointError: tensors are missing or unexpected, or a duplicate differs.
    """
    names, table = source.names(), spec.table
    file = source.info(names[0]).file if names else spec.architecture
    tensor_of = {entry.parameters[0]: name for name, entry in entries.items()}
    present = set(names)
    missing = [name for name in entries if name not in present]
    copies, unexpected = [], []
    for name in names:
        if name in entries or table.is_buffer(name) or name.startswith(spec.unread):
            continue
        path = table.copied_from(name)
        if path is None or path not in expected:
            unexpected.append(name)
        elif not same_bits(source.read(name), source.read(tensor_of[path])):
            raise CheckpointError(
                f"{file}: {name} is a copy of {tensor_of[path]} in this architecture, but "
                "they differ"
            )
        else:
            copies.append((name, path))
    if missing or unexpected:
        config = ", ".join(f"{f} {getattr(spec.config, f)!r}" for f in spec.family.structure)
        raise CheckpointError(
            f"{file}: the tensors do not fit a {spec.architecture} of this config.json ({config})"
            + (f"; missing {listed(missing)}" if missing else "")
            + (f"; unexpected {listed(unexpected)}" if unexpected else "")
            + (_NEW_HEAD if "score.weight" in missing else "")
        )
    return tuple(copies)


def check_shapes(
    entries: Mapping[str, Entry],
    expected: Mapping[str, Any],
    spec: ModelSpec,
    source: WeightSource,
) -> None:
    """Raises CheckpointError or UnsupportedError for a tensor of another shape or dtype."""
    for name, entry in entries.items():
        info = source.info(name)
        rows, *columns = expected[entry.parameters[0]].shape
        shape = (rows * len(entry.parameters), *columns)
        shape = shape[::-1] if entry.transposed else shape
        if info.shape != shape:
            fields = {f for size in (rows, *columns) for f in fields_of_size(spec.config, size)}
            raise CheckpointError(
                f"{info.file}: {name} has shape {list(info.shape)}, but config.json implies "
                f"{list(shape)} (from {', '.join(sorted(fields))})"
            )
        if info.dtype not in FLOATS:
            raise UnsupportedError(
                f"{info.file}: {name} is {info.dtype}; weights must be float32, bfloat16 or float16"
            )


def fields_of_size(config: ModelConfig, size: int) -> list[str]:
    """Config fields that explain a dimension: equal to it, or heads and head size as factors."""
    sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sizes = {k: v for k, v in sizes.items() if type(v) is int and not k.endswith("_id")}
    if isinstance(config, RotaryConfig):
        sizes |= {"head_dim": config.size_per_head, "num_key_value_heads": config.kv_heads}
    heads = [name for name in sizes if "head" in name or name == "d_kv"]
    pairs = [p for p in itertools.combinations(heads, 2) if sizes[p[0]] * sizes[p[1]] == size]
    return [name for name, value in sizes.items() if value == size] + [n for p in pairs for n in p]
