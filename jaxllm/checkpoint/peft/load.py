"""Reading LoRA from PEFT's files; see `jaxllm.checkpoint.peft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint.load import FLOATS
from jaxllm.checkpoint.peft.config import CLASSIFIER_NAMES, PeftConfig, read_peft_config
from jaxllm.checkpoint.peft.names import (
    CONFIG,
    MAGNITUDE,
    PREFIX,
    WEIGHTS,
    A,
    B,
    check_tied,
    paths_of,
    task_of,
    weight_entries,
)
from jaxllm.checkpoint.safetensors.reader import USE_SAFETENSORS, SafetensorsFile
from jaxllm.checkpoint.source import find_nonfinite, quoted
from jaxllm.common.errors import CheckpointError, NonFiniteError, UnsupportedError
from jaxllm.models.lora import base_entries, check_plain, module_at, with_lora
from jaxllm.models.weights import Entry, parameters, with_parameters
from jaxllm.nn.linear import Linear
from jaxllm.nn.lora import LoraLinear


def load_adapter(model: Any, folder: str | PathLike[str]) -> Any:
    """A model with the LoRA of PEFT's files; `model` shares its arrays and stays as it is.

    Every tensor is accounted for, and every layer that target_modules names must be in the file,
    with the rank that the config says. New parameters are float32.

    Args:
        model: the base model, without LoRA.
        folder: with adapter_config.json and adapter_model.safetensors.

    Raises:
        MissingFileError: A file is not there.
        ConfigError, UnsupportedError: The config, by field.
        CheckpointError: Tensors are missing, unexpected or ill-shaped.
        NonFiniteError: A tensor holds NaN or infinity.
    """
    folder = Path(folder).expanduser()
    check_plain(model)
    config = read_peft_config(folder / CONFIG)
    if config.task_type not in (None, task_of(model)):
        raise UnsupportedError(
            f"{folder / CONFIG}: task_type: {config.task_type!r}, but the model's is "
            f"{task_of(model)!r}"
        )
    path = folder / WEIGHTS
    if not path.is_file() and path.with_suffix(".bin").is_file():
        raise UnsupportedError(
            f"{folder} holds only {path.with_suffix('.bin').name}: {USE_SAFETENSORS}"
        )
    with SafetensorsFile(path) as file:
        tensors = {name: checked(file, name) for name in file.names()}
    try:
        return with_adapter(model, config, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def with_adapter(model: Any, config: PeftConfig, tensors: Mapping[str, np.ndarray]) -> Any:
    """The model with the adapter of these tensors, each used exactly once."""
    left = {name.removeprefix(PREFIX): x for name, x in tensors.items() if name.startswith(PREFIX)}
    if len(left) < len(tensors):
        odd = next(name for name in tensors if not name.startswith(PREFIX))
        raise CheckpointError(f"unexpected {quoted(odd)}: names begin with {PREFIX}")
    entries, layers = weight_entries(model), {}
    for name, entry in entries.items():
        linear = isinstance(module_at(model, paths_of(entry)[0]), Linear)
        there = [part for part in (A, B, MAGNITUDE) if f"{name}.{part}" in left]
        targeted = isinstance(config.target_modules, tuple) and config.targets(name)
        if there and linear:
            if isinstance(config.target_modules, tuple) and not targeted:
                raise CheckpointError(f"{name} has LoRA, but target_modules does not name it")
            check_base(model, name, entry, left)
            layers |= split_layers(model, config, name, entry, left)
        elif targeted and linear and not config.narrowed and not is_saved(config, name):
            raise CheckpointError(f"{name}.{A} is missing, but target_modules names its module")
    whole: dict[str, Any] = {}
    for name in config.modules_to_save:
        found = [e for e in base_entries(model) if e.theirs.rpartition(".")[0].endswith(name)]
        if not found and not (task_of(model) == "SEQ_CLS" and name in CLASSIFIER_NAMES):
            raise CheckpointError(
                f"modules_to_save: {name!r} is no module with weights in this model"
            )
        for entry in found:
            if not set(entry.ours) <= whole.keys():
                whole |= replaced(model, entry, left)
    if left:
        more = (
            "; embeddings with LoRA are not implemented" if "embedding_" in " ".join(left) else ""
        )
        raise CheckpointError(
            f"unexpected: {', '.join(quoted(name) for name in list(left)[:10])}"
            f" ({len(left)} in all){more}"
        )
    if not layers:
        raise CheckpointError("no tensor belongs to LoRA")
    check_tied(model, whole)
    saved = dict.fromkeys(path.rpartition(".")[0] for path in whole)
    return with_lora(with_parameters(model, whole), layers, saved)


def split_layers(
    model: Any, config: PeftConfig, name: str, entry: Entry, left: dict[str, np.ndarray]
) -> dict[str, LoraLinear]:
    """The layers of ours that one of PEFT's stands for; takes its tensors out of `left`."""
    bases = {path: module_at(model, path) for path in paths_of(entry)}
    outputs = [base.weight[...].shape[0] for base in bases.values()]
    inputs = next(iter(bases.values())).weight[...].shape[1]
    rank = config.rank_of(name)
    a = take(left, f"{name}.{A}", (rank, inputs))
    b = take(left, f"{name}.{B}", (sum(outputs), rank))
    parts = np.split(b, len(bases))
    magnitudes: Sequence[Any] = [None] * len(bases)
    if config.use_dora:
        magnitudes = np.split(take(left, f"{name}.{MAGNITUDE}", (sum(outputs),)), len(bases))
    return {
        path: LoraLinear(
            base,
            jnp.array(a, jnp.float32),
            jnp.array(part, jnp.float32),
            alpha=config.alpha_of(name),
            rslora=config.use_rslora,
            dropout_rate=config.lora_dropout,
            magnitude=None if magnitude is None else jnp.array(magnitude, jnp.float32),
        )
        for (path, base), part, magnitude in zip(bases.items(), parts, magnitudes, strict=True)
    }


def check_base(model: Any, name: str, entry: Entry, left: dict[str, np.ndarray]) -> None:
    """Beside the LoRA of a head PEFT saves the head itself, which must be the model's."""
    tensor = left.pop(f"{name}.base_layer.weight", None)
    if tensor is None:
        return
    mine = parameters(model)
    base = entry.join([np.asarray(mine[ours]) for ours in entry.ours])
    if tensor.shape != base.shape or not (tensor.astype(base.dtype) == base).all():
        raise CheckpointError(
            f"{name}.base_layer.weight differs from the model's; the adapter is for another base "
            "model, or for one whose vocabulary was resized"
        )


def replaced(model: Any, entry: Entry, left: dict[str, np.ndarray]) -> dict[str, Any]:
    """Our parameters that one tensor of a module trained whole stands for."""
    mine = parameters(model)
    rows, *columns = mine[entry.ours[0]].shape
    shape = (rows * len(entry.ours), *columns)
    tensor = take(left, entry.theirs, shape[::-1] if entry.transposed else shape)
    return {
        ours: jnp.array(part, jnp.promote_types(part.dtype, mine[ours].dtype))
        for ours, part in zip(entry.ours, entry.split(tensor), strict=True)
    }


def take(left: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name not in left:
        raise CheckpointError(f"{name} is missing")
    tensor = left.pop(name)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}, but model and config imply {list(shape)}"
        )
    return tensor


def checked(file: SafetensorsFile, name: str) -> np.ndarray:
    if file.info(name).dtype not in FLOATS:
        raise UnsupportedError(
            f"{file.path}: {quoted(name)} is {file.info(name).dtype}; expected float32, bfloat16 "
            "or float16"
        )
    tensor = file.read(name)
    sentence = find_nonfinite(name, tensor)
    if sentence:
        raise NonFiniteError(f"{file.path}: {sentence}")
    return tensor


def is_saved(config: PeftConfig, name: str) -> bool:
    return any(name.endswith(saved) for saved in config.modules_to_save)
