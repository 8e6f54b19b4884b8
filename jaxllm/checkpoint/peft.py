"""LoRA adapters as PEFT's files: adapter_config.json and adapter_model.safetensors.

PEFT knows GPT-2's q, k and v as one layer, `c_attn`, with one A; here each has its own. Reading
gives each a copy of A and its rows of B. Writing gives that back while the copies are equal. Where
they were trained apart, A is the three below each other and B is block-diagonal, of rank 3 r, with
alpha multiplied so that the scale stays: the same numbers, in a layer that PEFT loads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint.load import FLOATS
from jaxllm.checkpoint.peft_config import CLASSIFIER_NAMES, PeftConfig, read_peft_config
from jaxllm.checkpoint.safetensors import USE_SAFETENSORS, SafetensorsFile
from jaxllm.checkpoint.safetensors_writer import write_safetensors
from jaxllm.checkpoint.save import write_json
from jaxllm.checkpoint.source import find_nonfinite, quoted
from jaxllm.errors import (
    CheckpointError,
    InputError,
    NonFiniteError,
    UnsupportedError,
)
from jaxllm.models.base import CausalLM
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.lora import (
    base_entries,
    check_plain,
    lora_layers,
    module_at,
    table_of,
    with_lora,
)
from jaxllm.models.t5 import T5ForConditionalGeneration
from jaxllm.models.weights import Entry, parameters, with_parameters
from jaxllm.nn.linear import Linear
from jaxllm.nn.lora import LoraLinear, row_norms

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """LoRA of one layer as PEFT sees it, on the host."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def save_adapter(folder: str | PathLike[str], model: Any, *, base_model: str | None = None) -> None:
    """Writes the LoRA of a model, and the modules trained whole, as PEFT's files.

    ``PeftModel.from_pretrained(base, folder)`` loads them: nothing missing, nothing unexpected.

    Args:
        folder: made if it is not there.
        model: of `add_lora` or `load_adapter`.
        base_model: path or Hub id of the base model, noted in the config. None: where `load` found
            the model, if it did.

    Raises:
        InputError: The model has no LoRA, or layers of different kinds.
        UnsupportedError: An embedding trained whole that is also the head: PEFT would untie them.
    """
    folder = Path(folder).expanduser()
    layers = lora_layers(model)
    if not layers:
        raise InputError("save_adapter: the model has no LoRA; save_hf writes whole models")
    kinds = {(x.rslora, x.dropout_rate, x.lora_magnitude is not None) for x in layers.values()}
    if len(kinds) > 1:
        raise InputError("save_adapter: rslora, dropout and DoRA must be the same in all layers")
    rslora, dropout_rate, dora = kinds.pop()
    entries = weight_entries(model)
    adapters = {
        name: fused([module_at(model, path) for path in paths_of(entry)])
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

    rank, ranks = usual({name: x.rank for name, x in adapters.items()})
    alpha, alphas = usual({name: x.alpha for name, x in adapters.items()})
    origin = getattr(model, "origin", None)
    config = {
        "peft_type": "LORA",
        "task_type": task_of(model),
        "base_model_name_or_path": base_model or (origin.file if origin else None),
        "inference_mode": True,
        "r": rank,
        "rank_pattern": ranks,
        "lora_alpha": alpha,
        "alpha_pattern": alphas,
        "lora_dropout": dropout_rate,
        "use_rslora": rslora,
        "use_dora": dora,
        "bias": "none",
        "fan_in_fan_out": any(entries[name].transposed for name in adapters),
        "init_lora_weights": True,
        "target_modules": shortest(adapters, entries),
        "modules_to_save": sorted({n.rpartition(".")[0] for n in saved}) or None,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise CheckpointError(f"{folder}: cannot be made ({failure.strerror})") from failure
    write_safetensors(folder / WEIGHTS, tensors)
    write_json(folder / CONFIG, config)


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


def fused(parts: Sequence[Linear]) -> Adapter:
    """One adapter of several layers that a single one of PEFT's stands for; see the module."""
    adapted = [part for part in parts if isinstance(part, LoraLinear)]
    first = adapted[0]
    a, b = np.asarray(first.lora_a[...]), [np.asarray(x.lora_b[...]) for x in adapted]
    alike = all(
        x.scale == first.scale and np.array_equal(np.asarray(x.lora_a[...]), a) for x in adapted
    )
    alpha = first.alpha
    if alike and len(adapted) == len(parts):
        b = np.concatenate(b)
    else:
        a = np.concatenate([np.asarray(x.lora_a[...]) for x in adapted])
        growth = a.shape[0] / first.rank
        alpha *= math.sqrt(growth) if first.rslora else growth
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
        # A part without LoRA keeps its rows as long as they are.
        magnitude = np.concatenate([np.asarray(magnitude_of(part)) for part in parts])
    return Adapter(a, b, magnitude, int(alpha) if alpha == int(alpha) else alpha)


def magnitude_of(part: Linear) -> Any:
    if isinstance(part, LoraLinear) and part.lora_magnitude is not None:
        return part.lora_magnitude[...]
    return row_norms(part.weight[...])


def saved_tensors(model: Any) -> dict[str, np.ndarray]:
    """The modules trained whole, under Hugging Face's names."""
    params = parameters(model)
    wanted = {path for path in params if path.rpartition(".")[0] in model.modules_to_save}
    check_tied(model, wanted)
    tensors = {}
    for entry in base_entries(model):
        if wanted.isdisjoint(entry.ours):
            continue
        if not wanted.issuperset(entry.ours):
            raise UnsupportedError(
                f"{entry.theirs}: only a part is trained whole; name all in modules_to_save: "
                f"{', '.join(entry.ours)}"
            )
        tensors[entry.theirs] = entry.join([np.asarray(params[o]) for o in entry.ours])
    return tensors


def check_tied(model: Any, paths: Any) -> None:
    """PEFT would put a copy in the place of one of several modules that share a weight."""
    headless = hasattr(model, "lm_head") and model.lm_head is None
    for pattern, ours in table_of(model).copies:
        if ours in paths and (headless or "lm_head" not in pattern):
            raise UnsupportedError(
                f"modules_to_save: {ours} is used in several places, which PEFT's files cannot "
                "say; write the merged model (merge_lora, save_hf) instead"
            )


def weight_entries(model: Any) -> dict[str, Entry]:
    """Every weight of the base model, by its module's name in Hugging Face's model."""
    return {
        entry.theirs.removesuffix(".weight"): entry
        for entry in base_entries(model)
        if entry.theirs.endswith(".weight")
    }


def paths_of(entry: Entry) -> list[str]:
    return [ours.removesuffix(".weight") for ours in entry.ours]


def is_saved(config: PeftConfig, name: str) -> bool:
    return any(name.endswith(saved) for saved in config.modules_to_save)


def usual(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The most frequent value, and the others by name."""
    found = list(values.values())
    default = max(dict.fromkeys(found), key=found.count)
    return default, {name: value for name, value in values.items() if value != default}


def shortest(adapters: Mapping[str, Adapter], entries: Mapping[str, Entry]) -> list[str]:
    """target_modules: the modules' last names if those name no other module, else whole names."""
    last = {name.rpartition(".")[2] for name in adapters}
    named = {name for name in entries if name.rpartition(".")[2] in last}
    return sorted(last if named == adapters.keys() else adapters)


def task_of(model: Any) -> str:
    """PEFT's name of what the model is for."""
    if isinstance(model, SequenceClassifier):
        return "SEQ_CLS"
    if isinstance(model, CausalLM):
        return "CAUSAL_LM"
    seq2seq = isinstance(model, T5ForConditionalGeneration)
    return "SEQ_2_SEQ_LM" if seq2seq else "FEATURE_EXTRACTION"
