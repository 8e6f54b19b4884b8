"""Saves LoRA in PEFT's format; see `jaxllm.checkpoint.peft`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoint.peft.names import (
    CONFIG,
    MAGNITUDE,
    PREFIX,
    WEIGHTS_FILE,
    A,
    B,
    check_tied,
    paths_of,
    task_of,
    weight_entries,
)
from jaxllm.checkpoint.safetensors.writer import write_safetensors
from jaxllm.common.errors import CheckpointError, InputError, UnsupportedError
from jaxllm.common.files import expanded, make_folder, write_json
from jaxllm.models.lora import base_entries, lora_layers, module_at
from jaxllm.models.model import Model
from jaxllm.models.weights import Entry, parameters
from jaxllm.nn.linear import Linear
from jaxllm.nn.lora import LoraLinear, row_norms


@dataclasses.dataclass(frozen=True)
class Adapter:
    """LoRA parameters of one PEFT layer, on the host."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def save_adapter(
    folder: str | PathLike[str],
    model: Model[Any],
    *,
    base_model: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the LoRA of a model, and its modules_to_save, in PEFT's format.

    ``PeftModel.from_pretrained(base, folder)`` loads them without missing or unexpected keys.

    Args:
        folder: created if it does not exist.
        model: a model from `add_lora` or `load_adapter`.
        base_model: path or Hub id of the base model, written to the config. None: the path that
            `load` loaded the model from, if it did.
        overwrite: replace an adapter that is in the folder.

    Raises:
        CheckpointError: the folder holds an adapter already, or cannot be written.
        InputError: the model has no LoRA, or layers of different kinds.
        UnsupportedError: modules_to_save has a tied embedding, which PEFT would untie.
    """
    card = model.checked_card("save_adapter")
    folder = expanded(folder)
    if not overwrite and any((folder / name).exists() for name in (CONFIG, WEIGHTS_FILE)):
        raise CheckpointError(
            f"{folder}: there is an adapter already; use another folder, or overwrite=True to "
            "replace it"
        )
    layers = lora_layers(model)
    if not layers:
        raise InputError("save_adapter: the model has no LoRA; save_hf writes whole models")
    variants = {(x.rslora, x.dropout_rate, x.lora_magnitude is not None) for x in layers.values()}
    if len(variants) > 1:
        raise InputError("save_adapter: rslora, dropout and DoRA must be the same in all layers")
    rslora, dropout_rate, dora = variants.pop()
    entries = weight_entries(model)
    adapters = {
        name: fuse([module_at(model, path) for path in paths_of(entry)])
        for name, entry in entries.items()
        if any(path in layers for path in paths_of(entry))
    }
    tensors: dict[str, np.ndarray] = {}
    for name, adapter in adapters.items():
        tensors[f"{PREFIX}{name}.{A}"], tensors[f"{PREFIX}{name}.{B}"] = adapter.a, adapter.b
        if adapter.magnitude is not None:
            tensors[f"{PREFIX}{name}.{MAGNITUDE}"] = adapter.magnitude
    saved = saved_tensors(model)
    tensors |= {PREFIX + name: x for name, x in saved.items()}
    config = {
        "task_type": task_of(model),
        "base_model_name_or_path": base_model or (card.origin.file if card.origin else None),
        "lora_dropout": dropout_rate,
        "use_rslora": rslora,
        "use_dora": dora,
        "modules_to_save": sorted({n.rpartition(".")[0] for n in saved}) or None,
        **adapter_fields(adapters, entries),
    }
    make_folder(folder)
    write_safetensors(folder / WEIGHTS_FILE, tensors)
    write_json(folder / CONFIG, config)


def adapter_fields(adapters: Mapping[str, Adapter], entries: Mapping[str, Entry]) -> dict[str, Any]:
    """Fields of adapter_config.json that follow from the adapted layers."""
    rank, ranks = most_common({name: x.rank for name, x in adapters.items()})
    alpha, alphas = most_common({name: x.alpha for name, x in adapters.items()})
    return {
        "peft_type": "LORA",
        "inference_mode": True,
        "r": rank,
        "rank_pattern": ranks,
        "lora_alpha": alpha,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": any(entries[name].transposed for name in adapters),
        "init_lora_weights": True,
        "target_modules": shortest_targets(adapters, entries),
    }


def fuse(parts: Sequence[Linear]) -> Adapter:
    """Fuses our layers into the adapter of one PEFT layer; see `jaxllm.checkpoint.peft`."""
    adapted = [part for part in parts if isinstance(part, LoraLinear)]
    first = adapted[0]
    a, b = np.asarray(first.lora_a[...]), [np.asarray(x.lora_b[...]) for x in adapted]
    same_a = all(
        x.scale == first.scale and np.array_equal(np.asarray(x.lora_a[...]), a) for x in adapted
    )
    alpha = first.alpha
    if same_a and len(adapted) == len(parts):
        b = np.concatenate(b)
    else:
        a = np.concatenate([np.asarray(x.lora_a[...]) for x in adapted])
        factor = a.shape[0] / first.rank
        alpha *= math.sqrt(factor) if first.rslora else factor
        outputs = [part.weight[...].shape[0] for part in parts]
        b = np.zeros((sum(outputs), a.shape[0]), a.dtype)
        row = column = 0
        for part, height in zip(parts, outputs, strict=True):
            if isinstance(part, LoraLinear):
                columns = slice(column, column + part.rank)
                b[row : row + height, columns] = np.asarray(part.lora_b[...]) * (
                    part.scale / first.scale
                )
                column += part.rank
            row += height
    magnitude = None
    if first.lora_magnitude is not None:
        # Rows of a part without LoRA keep their norms.
        magnitude = np.concatenate([np.asarray(magnitude_of(part)) for part in parts])
    return Adapter(a, b, magnitude, int(alpha) if alpha == int(alpha) else alpha)


def magnitude_of(part: Linear) -> jax.Array:
    """DoRA's magnitude of each row; the row's norm for a layer without DoRA."""
    if isinstance(part, LoraLinear) and part.lora_magnitude is not None:
        return part.lora_magnitude[...]
    return row_norms(part.weight[...])


def saved_tensors(model: Model[Any]) -> dict[str, np.ndarray]:
    """The weights of modules_to_save, under Hugging Face's names."""
    params = parameters(model)
    modules = model.checked_card("save_adapter").modules_to_save
    paths = {path for path in params if path.rpartition(".")[0] in modules}
    check_tied(model, paths)
    tensors = {}
    for entry in base_entries(model):
        if paths.isdisjoint(entry.parameters):
            continue
        if not paths.issuperset(entry.parameters):
            raise UnsupportedError(
                f"{entry.tensor}: only a part is in modules_to_save; name all of it: "
                f"{', '.join(entry.parameters)}"
            )
        tensors[entry.tensor] = entry.join([np.asarray(params[o]) for o in entry.parameters])
    return tensors


def most_common(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most common value, and the other values by name."""
    ordered = list(values.values())
    default = max(dict.fromkeys(ordered), key=ordered.count)
    return default, {name: value for name, value in values.items() if value != default}


def shortest_targets(adapters: Mapping[str, Adapter], entries: Mapping[str, Entry]) -> list[str]:
    """target_modules: last parts of the names if they match no other module, else full names."""
    last_parts = {name.rpartition(".")[2] for name in adapters}
    named = {name for name in entries if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if named == adapters.keys() else adapters)
