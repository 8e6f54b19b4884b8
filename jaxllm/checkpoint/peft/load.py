"""Loads LoRA from PEFT's files; see `jaxllm.checkpoint.peft`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint.peft.config import CLASSIFIER_NAMES, PeftConfig, read_peft_config
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
from jaxllm.checkpoint.safetensors.reader import USE_SAFETENSORS, SafetensorsFile
from jaxllm.checkpoint.source import FLOATS, find_nonfinite
from jaxllm.common.errors import CheckpointError, NonFiniteError, UnsupportedError, listed, quoted
from jaxllm.common.files import expanded
from jaxllm.models.lora import base_entries, check_plain, module_at, with_lora
from jaxllm.models.model import Model
from jaxllm.models.weights import Entry, parameters, with_parameters
from jaxllm.nn.linear import Linear
from jaxllm.nn.lora import LoraLinear

M = TypeVar("M", bound=Model[Any])


def load_adapter(
    model: M, folder: str | PathLike[str], *, config: Mapping[str, Any] | None = None
) -> M:
    """Adds a PEFT adapter to a model; returns a new model that shares its arrays.

    Every tensor of the file must belong to the model, and every layer that target_modules names
    must be in the file, with the config's rank. New parameters are float32.

    Args:
        model: the base model, without LoRA.
        folder: holds adapter_config.json and adapter_model.safetensors.
        config: fields that override adapter_config.json's; None: as if the file had none.

    Raises:
        MissingFileError: a file is missing.
        ConfigError, UnsupportedError: a field of the config is invalid or unsupported.
        CheckpointError: tensors are missing, unexpected or ill-shaped.
        NonFiniteError: a tensor holds NaN or infinity.
    """
    folder = expanded(folder)
    check_plain(model)
    adapter = read_peft_config(folder / CONFIG, config)
    if adapter.task_type not in (None, task_of(model)):
        raise UnsupportedError(
            f"{folder / CONFIG}: task_type: {adapter.task_type!r}, but the model's is "
            f"{task_of(model)!r}"
        )
    path = folder / WEIGHTS_FILE
    if not path.is_file() and path.with_suffix(".bin").is_file():
        raise UnsupportedError(
            f"{folder} holds only {path.with_suffix('.bin').name}: {USE_SAFETENSORS}"
        )
    with SafetensorsFile(path) as file:
        tensors = {name: read_tensor(file, name) for name in file.names()}
    try:
        return with_adapter(model, adapter, tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def with_adapter(model: M, config: PeftConfig, tensors: Mapping[str, np.ndarray]) -> M:
    """Adds the adapter of these tensors to the model; each tensor is used exactly once."""
    unused = {
        name.removeprefix(PREFIX): x for name, x in tensors.items() if name.startswith(PREFIX)
    }
    if len(unused) < len(tensors):
        unexpected = next(name for name in tensors if not name.startswith(PREFIX))
        raise CheckpointError(f"unexpected {quoted(unexpected)}: names begin with {PREFIX}")
    entries, layers = weight_entries(model), {}
    for name, entry in entries.items():
        linear = isinstance(module_at(model, paths_of(entry)[0]), Linear)
        present = any(f"{name}.{part}" in unused for part in (A, B, MAGNITUDE))
        targeted = isinstance(config.target_modules, tuple) and config.targets(name)
        if present and linear:
            if isinstance(config.target_modules, tuple) and not targeted:
                raise CheckpointError(f"{name} has LoRA, but target_modules does not name it")
            check_base_model(model, name, entry, unused)
            layers |= split_layers(model, config, name, entry, unused)
        elif targeted and linear and not config.narrowed and not is_saved(config, name):
            raise CheckpointError(f"{name}.{A} is missing, but target_modules names its module")
    saved: dict[str, jax.Array] = {}
    for name in config.modules_to_save:
        matching = [e for e in base_entries(model) if e.tensor.rpartition(".")[0].endswith(name)]
        if not matching and not (task_of(model) == "SEQ_CLS" and name in CLASSIFIER_NAMES):
            raise CheckpointError(
                f"modules_to_save: {name!r} is no module with weights in this model"
            )
        for entry in matching:
            if not set(entry.parameters) <= saved.keys():
                saved |= take_saved(model, entry, unused)
    if unused:
        on_embeddings = any("embedding_" in name for name in unused)
        advice = "; embeddings with LoRA are not implemented" if on_embeddings else ""
        raise CheckpointError(f"unexpected: {listed([quoted(name) for name in unused])}{advice}")
    if not layers:
        raise CheckpointError("no tensor belongs to LoRA")
    check_tied(model, saved)
    modules = dict.fromkeys(path.rpartition(".")[0] for path in saved)
    return with_lora(with_parameters(model, saved), layers, modules)


def split_layers(
    model: Model[Any], config: PeftConfig, name: str, entry: Entry, unused: dict[str, np.ndarray]
) -> dict[str, LoraLinear]:
    """Builds our layers for one PEFT layer; removes its tensors from `unused`."""
    bases = {path: module_at(model, path) for path in paths_of(entry)}
    outputs = [base.weight[...].shape[0] for base in bases.values()]
    inputs = next(iter(bases.values())).weight[...].shape[1]
    rank = config.rank_of(name)
    a = take_tensor(unused, f"{name}.{A}", (rank, inputs))
    b = take_tensor(unused, f"{name}.{B}", (sum(outputs), rank))
    parts = np.split(b, len(bases))
    magnitudes: Sequence[Any] = [None] * len(bases)
    if config.use_dora:
        magnitudes = np.split(
            take_tensor(unused, f"{name}.{MAGNITUDE}", (sum(outputs),)), len(bases)
        )
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


def check_base_model(
    model: Model[Any], name: str, entry: Entry, unused: dict[str, np.ndarray]
) -> None:
    """Checks the base weight that PEFT saves beside the LoRA of an LM head."""
    tensor = unused.pop(f"{name}.base_layer.weight", None)
    if tensor is None:
        return
    params = parameters(model)
    base = entry.join([np.asarray(params[ours]) for ours in entry.parameters])
    if tensor.shape != base.shape or not (tensor.astype(base.dtype) == base).all():
        raise CheckpointError(
            f"{name}.base_layer.weight differs from the model's; the adapter is for another base "
            "model, or for one whose vocabulary was resized"
        )


def take_saved(
    model: Model[Any], entry: Entry, unused: dict[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Parameters from one tensor of modules_to_save; removes it from `unused`."""
    params = parameters(model)
    rows, *columns = params[entry.parameters[0]].shape
    shape = (rows * len(entry.parameters), *columns)
    tensor = take_tensor(unused, entry.tensor, shape[::-1] if entry.transposed else shape)
    return {
        ours: jnp.array(part, jnp.promote_types(part.dtype, params[ours].dtype))
        for ours, part in zip(entry.parameters, entry.split(tensor), strict=True)
    }


def take_tensor(unused: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Removes a tensor of this shape from `unused` and returns it."""
    if name not in unused:
        raise CheckpointError(f"{name} is missing")
    tensor = unused.pop(name)
    if tensor.shape != shape:
        raise CheckpointError(
            f"{name} has shape {list(tensor.shape)}, but model and config imply {list(shape)}"
        )
    return tensor


def read_tensor(file: SafetensorsFile, name: str) -> np.ndarray:
    """Reads a tensor; checks that it is finite and of a float dtype."""
    if file.info(name).dtype not in FLOATS:
        raise UnsupportedError(
            f"{file.path}: {quoted(name)} is {file.info(name).dtype}; expected float32, bfloat16 "
            "or float16"
        )
    tensor = file.read(name)
    problem = find_nonfinite(name, tensor)
    if problem:
        raise NonFiniteError(f"{file.path}: {problem}")
    return tensor


def is_saved(config: PeftConfig, name: str) -> bool:
    return any(name.endswith(saved) for saved in config.modules_to_save)
