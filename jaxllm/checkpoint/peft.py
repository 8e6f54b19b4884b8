"""LoRA adapters in PEFT's format: adapter_config.json, and adapter_model.safetensors or .bin.

PEFT adapts GPT-2's q, k and v as one layer, `c_attn`. Here each has its rows of B, and they share
an A. In models whose q, k and v have an A each (``add_lora(..., share_a=False)``), saving stacks
the three A, and B is block-diagonal, of rank 3 r, with alpha multiplied to keep the scale: PEFT
computes the same outputs.

Of adapter_config.json, a field is used, is known to be inert, or raises.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import typing
from collections.abc import Container, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint.hub import hub_name
from jaxllm.checkpoint.safetensors import write_safetensors
from jaxllm.checkpoint.save import check_parameters
from jaxllm.checkpoint.source import check_repetitions, read_tensor
from jaxllm.checkpoint.weight_files import open_weights
from jaxllm.common.arguments import checked
from jaxllm.common.config_keys import describe_keys, unknown_keys
from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    MissingFileError,
    UnsupportedError,
    listed,
    quoted,
)
from jaxllm.common.files import expanded, is_there, make_folder, read_json, write_json
from jaxllm.models.config_checks import check_rate, check_size, coerce
from jaxllm.models.decoder_only import CausalLM, SequenceClassifier
from jaxllm.models.lora import (
    base_entries,
    check_plain,
    lora_layers,
    module_at,
    table_of,
    with_lora,
)
from jaxllm.models.model import Model
from jaxllm.models.weights import Entry, parameters, with_parameters
from jaxllm.nn.linear import Linear
from jaxllm.nn.lora import LoraLinear, row_norms

M = TypeVar("M", bound=Model[Any])

CONFIG = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE, DELTA = "token_adapter.base_layer.weight", "token_adapter.trainable_tokens_delta"
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
MAX_CONFIG_BYTES = 4 * 2**20
EMBEDDING_NAMES = ("embed_tokens", "wte", "shared", "word_embeddings", "lm_head", "embed_out")
CLASSIFIER_NAMES = ("classifier", "score")  # PEFT adds both to each classifier's modules_to_save

# Fields of initialisation and training that do not change the adapter's output, in addition to the
# fields of `common.config_keys`. fan_in_fan_out says how the *base* weight is stored, which the
# model knows.
# fmt: off
INERT_ADAPTER_KEYS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "lora_ga_config", "megatron_core", "merge_weights", "peft_version",
    "qalora_group_size", "revision", "runtime_config",
    # ms-swift's: dtype in training, and the learning rates of LoRA+.
    "lora_dtype", "lorap_emb_lr", "lorap_lr_ratio",
})
OFF_ADAPTER_KEYS = frozenset({
    "alora_invocation_tokens", "arrow_config", "enable_lora", "ensure_weight_tying", "kasa_config",
    "layer_replication", "loftq_config", "lora_bias", "megatron_config", "monteclora_config",
    "target_parameters", "use_bdlora", "use_merged_linear",
    "use_qa_lora", "use_qalora", "velora_config",
})
"""Fields that change no result while they are false or empty."""
# fmt: on
# Fields that may exclude some of the targets.
NARROWING = ("exclude_modules", "layers_to_transform", "layers_pattern")
# Initialisations that leave the base weights alone; the others (PiSSA, OLoRA, ...) change them.
KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
# Allowed patterns of rank_pattern and alpha_pattern: they match in linear time.
PLAIN_PATTERN = re.compile(r"\^?[\w.\\-]+\$?")


def load_adapter(
    model: M, folder: str | PathLike[str], *, config: Mapping[str, Any] | None = None
) -> M:
    """Adds a PEFT adapter to a model; returns a new model that shares its arrays.

    Every tensor of the file must belong to the model, and every layer that target_modules names
    must be in the file, with the config's rank. New parameters are float32. Embeddings that the
    file holds as a whole, or rows of (`trainable_token_indices`), count as `modules_to_save`.

    Args:
        model: the base model, without LoRA. For an adapter of a resized vocabulary, a model from
            `resize_token_embeddings`.
        folder: holds adapter_config.json, and adapter_model.safetensors or adapter_model.bin.
        config: fields that override adapter_config.json's; None: as if the file had none.

    Raises:
        MissingFileError: a file is missing.
        ConfigError, UnsupportedError: a field of the config is invalid or unsupported.
        CheckpointError: tensors are missing, unexpected or ill-shaped.
        NonFiniteError: a tensor holds NaN or infinity.
    """
    folder = expanded(checked(folder, (str, PathLike), "folder", "the folder of an adapter"))
    check_plain(checked(model, (Model,), "model", "a model"))
    if not os.path.lexists(folder / CONFIG):
        raise MissingFileError(f"{folder}: {_not_an_adapter(folder)}")
    adapter = read_peft_config(folder / CONFIG, config)
    if adapter.task_type not in (None, task_type(model)):
        raise UnsupportedError(
            f"{folder / CONFIG}: task_type: {adapter.task_type!r}, but the model's is "
            f"{task_type(model)!r}"
        )
    path = folder / WEIGHTS_FILE
    if not is_there(path, CheckpointError) and is_there(path.with_suffix(".bin"), CheckpointError):
        path = path.with_suffix(".bin")  # of older versions of PEFT
    with open_weights(path) as file:
        check_repetitions(file, file.names())
        tensors = {name: read_tensor(file, name) for name in file.names()}
    try:
        return with_adapter(model, adapter, tensors)
    except CheckpointError as error:
        base = f" (an adapter for {adapter.base})" if adapter.base else ""
        raise CheckpointError(f"{path}{base}: {error}") from None


def _not_an_adapter(folder: Path) -> str:
    """What a folder without adapter_config.json is, and what to do."""
    if not folder.is_dir():
        return (
            "no such folder; an adapter is a folder that `jaxllm export --adapter` or PEFT wrote, "
            "and a model takes one adapter at most"
        )
    if (folder / "checkpoints").is_dir():
        export = f"`jaxllm export {folder} OUT --adapter`"
        return f"holds a training run, not an adapter; write its adapter with {export}"
    if (folder / "config.json").is_file():
        return "holds a model, not an adapter; name it as the model"
    return (
        f"not an adapter, which has {CONFIG} and {WEIGHTS_FILE}; give the folder of one, since a "
        "model takes one adapter at most"
    )


def with_adapter(model: M, config: PeftConfig, tensors: Mapping[str, np.ndarray]) -> M:
    """Adds the adapter of these tensors to the model; each tensor is used exactly once."""
    unused = {
        name.removeprefix(PREFIX): x for name, x in tensors.items() if name.startswith(PREFIX)
    }
    if len(unused) < len(tensors):
        unexpected = next(name for name in tensors if not name.startswith(PREFIX))
        raise CheckpointError(f"unexpected {quoted(unexpected)}: names begin with {PREFIX}")
    layers: dict[str, LoraLinear] = {}
    embeddings = take_embeddings(model, config, unused)
    for name, entry in weight_entries(model).items():
        linear = isinstance(module_at(model, entry.modules[0]), Linear)
        present = any(f"{name}.{part}" in unused for part in (A, B, MAGNITUDE))
        targeted = isinstance(config.target_modules, tuple) and config.targets(name)
        if present and linear:
            if isinstance(config.target_modules, tuple) and not targeted:
                raise CheckpointError(f"{name} has LoRA, but target_modules does not name it")
            if not config.covers_layer(name):
                raise CheckpointError(
                    f"{name} has LoRA, but layers_to_transform excludes its layer"
                )
            check_base_model(model, name, entry, unused)
            layers |= split_layers(model, config, name, entry, unused)
        elif targeted and linear and not (config.narrowed or name.endswith(config.modules_to_save)):
            raise CheckpointError(f"{name}.{A} is missing, but target_modules names its module")
    saved: dict[str, jax.Array] = {}
    for name in config.modules_to_save:
        matching = [e for e in base_entries(model) if e.tensor.rpartition(".")[0].endswith(name)]
        if not matching and not (task_type(model) == "SEQ_CLS" and name in CLASSIFIER_NAMES):
            raise CheckpointError(
                f"modules_to_save: {name!r} is no module with weights in this model"
            )
        for entry in matching:
            if not set(entry.parameters) <= saved.keys():
                saved |= take_saved(model, entry, unused)
    if unused:
        on_embeddings = any("embedding_" in name for name in unused)
        advice = "; embeddings with LoRA are not implemented" if on_embeddings else ""
        if any(".experts." in name for name in unused):
            advice = "; experts with LoRA are not implemented"
        raise CheckpointError(f"unexpected: {listed([quoted(name) for name in unused])}{advice}")
    if not layers:
        raise CheckpointError("no tensor belongs to LoRA")
    check_tied(model, saved)
    saved = embeddings | saved
    modules = dict.fromkeys(path.rpartition(".")[0] for path in saved)
    return with_lora(with_parameters(model, saved), layers, modules)


def take_embeddings(
    model: Model[Any], config: PeftConfig, unused: dict[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Token embeddings and LM heads that an adapter holds as a whole, or rows of them.

    After the vocabulary was resized, PEFT writes whole embedding matrices in addition to the
    matrices of `modules_to_save`. For `trainable_token_indices` PEFT writes single rows. The
    tensors are removed from `unused`.
    """
    size, saved = model.config.vocab_size, dict[str, jax.Array]()
    for name, entry in weight_entries(model).items():
        if name.rpartition(".")[2] not in EMBEDDING_NAMES:
            continue
        for part in (f"{name}.{x}" for x in ("weight", BASE, "modules_to_save.weight")):
            if part in unused and (rows := len(unused[part])) != size:
                raise CheckpointError(
                    f"{part} has {rows} tokens, but the model has {size}; call "
                    f"model = model.resize_token_embeddings({rows}), then load_adapter"
                )
        if getattr(model, "lm_head", True) is None:
            drop_tied_head(model, name, unused)
        unused.pop(f"{name}.original_module.weight", None)  # what is used without the adapter
        trained = unused.pop(f"{name}.modules_to_save.weight", None)
        if trained is not None and not np.array_equal(trained, unused.get(entry.tensor, trained)):
            raise CheckpointError(f"{name}.modules_to_save.weight differs from {entry.tensor}")
        if trained is not None:
            unused[entry.tensor] = trained
        if f"{name}.{BASE}" in unused:
            unused[entry.tensor] = unused.pop(f"{name}.{BASE}")
        delta = unused.pop(f"{name}.{DELTA}", None)
        if entry.tensor in unused and not name.endswith(config.modules_to_save or (" ",)):
            saved |= take_saved(model, entry, unused)
        if delta is not None:
            (path,) = entry.parameters
            weight = saved.get(path, parameters(model)[path])
            rows = config.token_rows(name)
            if delta.shape != (len(rows), weight.shape[1]) or max(rows) >= size:
                raise CheckpointError(
                    f"{name}.{DELTA} has shape {list(delta.shape)}, but trainable_token_indices "
                    f"names {len(rows)} of {size} tokens, each of {weight.shape[1]} values"
                )
            saved[path] = weight.at[np.asarray(rows)].set(delta.astype(weight.dtype))
    return saved


def drop_tied_head(model: Model[Any], name: str, unused: dict[str, np.ndarray]) -> None:
    """Removes the tensors of a tied LM head, which must equal the embedding's, called `name`."""
    for part in ("weight", "modules_to_save.weight", "original_module.weight", BASE, DELTA):
        head = unused.pop(f"lm_head.{part}", None)
        if head is not None and not np.array_equal(head, unused.get(f"{name}.{part}", 0)):
            raise UnsupportedError(
                f"lm_head.{part} differs from {name}.{part}, but the model's head is tied to its "
                "embedding; merge the adapter with PEFT (merge_and_unload), and load the result"
            )


def split_layers(
    model: Model[Any], config: PeftConfig, name: str, entry: Entry, unused: dict[str, np.ndarray]
) -> dict[str, LoraLinear]:
    """Builds our layers for one PEFT layer; removes its tensors from `unused`."""
    bases = {path: module_at(model, path) for path in entry.modules}
    outputs = [base.weight[...].shape[0] for base in bases.values()]
    inputs = next(iter(bases.values())).weight[...].shape[1]
    rank = config.rank_of(name)
    a = take_tensor(unused, f"{name}.{A}", (rank, inputs))
    b = take_tensor(unused, f"{name}.{B}", (sum(outputs), rank))
    parts = entry.parts(b)
    magnitudes: Sequence[Any] = [None] * len(bases)
    if config.use_dora:
        magnitudes = entry.parts(take_tensor(unused, f"{name}.{MAGNITUDE}", (sum(outputs),)))
    owner, *_ = (path.rpartition(".")[2] for path in bases)
    return {
        path: LoraLinear(
            base,
            owner if number else jnp.array(a, jnp.float32),
            jnp.array(part, jnp.float32),
            alpha=config.alpha_of(name),
            rslora=config.use_rslora,
            dropout_rate=config.lora_dropout,
            magnitude=None if magnitude is None else jnp.array(magnitude, jnp.float32),
        )
        for number, ((path, base), part, magnitude) in enumerate(
            zip(bases.items(), parts, magnitudes, strict=True)
        )
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
    shape = entry.tensor_shape(params[entry.parameters[0]].shape)
    tensor = take_tensor(unused, entry.tensor, shape)
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
    check_parameters(model, "save_adapter")
    card = model.checked_card("save_adapter")
    base = base_model or (card.origin.file if card.origin else None)
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
        name: fuse([module_at(model, path) for path in entry.modules], entry)
        for name, entry in entries.items()
        if any(path in layers for path in entry.modules)
    }
    tensors = {
        f"{PREFIX}{name}.{part}": x
        for name, (parts, _) in adapters.items()
        for part, x in parts.items()
    }
    saved = saved_tensors(model)
    tensors |= {PREFIX + name: x for name, x in saved.items()}
    rank, ranks = most_common({name: parts[A].shape[0] for name, (parts, _) in adapters.items()})
    alpha, alphas = most_common({name: alpha for name, (_, alpha) in adapters.items()})
    config = {
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
        "task_type": task_type(model),
        "base_model_name_or_path": None if base is None else hub_name(base),
        "lora_dropout": dropout_rate,
        "use_rslora": rslora,
        "use_dora": dora,
        "modules_to_save": sorted({n.rpartition(".")[0] for n in saved}) or None,
    }
    make_folder(folder)
    write_safetensors(folder / WEIGHTS_FILE, tensors)
    write_json(folder / CONFIG, config)


def fuse(parts: Sequence[Linear], entry: Entry) -> tuple[dict[str, np.ndarray], float]:
    """Fuses our layers, whose weights have this entry, into the tensors of one PEFT layer and its
    alpha; see `jaxllm.checkpoint.peft`."""
    adapted = [part for part in parts if isinstance(part, LoraLinear)]
    first = adapted[0]
    a = np.concatenate([np.asarray(x.lora_a[...]) for x in adapted if x.lora_a is not None])
    factor = a.shape[0] / first.rank
    alpha = first.alpha * (math.sqrt(factor) if first.rslora else factor)
    outputs = [part.weight[...].shape[0] for part in parts]
    b = np.zeros((sum(outputs), a.shape[0]), a.dtype)
    row = column = 0
    for part, height in zip(parts, outputs, strict=True):
        if isinstance(part, LoraLinear):
            column = column if part.lora_a is None or part is first else column + part.rank
            b[row : row + height, column : column + part.rank] = np.asarray(part.lora_b[...]) * (
                part.scale / first.scale
            )
        row += height
    tensors = {A: a, B: np.ascontiguousarray(entry.whole(b))}
    if first.lora_magnitude is not None:
        # Rows of a part without LoRA keep their norms.
        magnitudes = (
            part.lora_magnitude if isinstance(part, LoraLinear) else None for part in parts
        )
        own = [
            row_norms(part.weight[...]) if magnitude is None else magnitude[...]
            for part, magnitude in zip(parts, magnitudes, strict=True)
        ]
        tensors[MAGNITUDE] = entry.whole(np.concatenate([np.asarray(x) for x in own]))
    return tensors, int(alpha) if alpha == int(alpha) else alpha


def saved_tensors(model: Model[Any]) -> dict[str, np.ndarray]:
    """The weights of modules_to_save, under Hugging Face's names."""
    params = parameters(model)
    modules = model.checked_card("save_adapter").lora_modules("save_adapter")
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


def shortest_targets(adapters: Mapping[str, Any], entries: Mapping[str, Entry]) -> list[str]:
    """target_modules: last parts of the names if they match no other module, else full names."""
    last_parts = {name.rpartition(".")[2] for name in adapters}
    named = {name for name in entries if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if named == adapters.keys() else adapters)


def weight_entries(model: Model[Any]) -> dict[str, Entry]:
    """Table entries of the base model's weights, by the module's Hugging Face name."""
    return {
        entry.tensor.removesuffix(".weight"): entry
        for entry in base_entries(model)
        if entry.tensor.endswith(".weight")
    }


def task_type(model: Model[Any]) -> str:
    """PEFT's task type of a model."""
    if isinstance(model, SequenceClassifier):
        return "SEQ_CLS"
    if isinstance(model, CausalLM):
        return "CAUSAL_LM"
    return "SEQ_2_SEQ_LM" if model.is_encoder_decoder else "FEATURE_EXTRACTION"


def check_tied(model: Model[Any], paths: Container[str]) -> None:
    """Raises UnsupportedError if several modules share a weight: PEFT would untie them."""
    headless = getattr(model, "lm_head", True) is None  # tied to the embedding
    for pattern, ours in table_of(model).copies:
        if ours in paths and (headless or "lm_head" not in pattern):
            raise UnsupportedError(
                f"modules_to_save: {ours} is used in several places, which PEFT's files cannot "
                "say; write the merged model (merge_lora, save_hf) instead"
            )


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """Fields of adapter_config.json that have an effect, under PEFT's names."""

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    task_type: str | None = None
    target_modules: tuple[str, ...] | str = ()
    modules_to_save: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layers_to_transform: int | tuple[int, ...] | None = None
    trainable_token_indices: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Rows of embeddings that the adapter replaces, by the end of the module's name; "" stands for
    the token embedding."""
    base: str | None = None
    """base_model_name_or_path, for messages."""
    narrowed: bool = False
    """True if exclude_modules or layers_to_transform may exclude some of the targets."""

    def rank_of(self, module: str) -> int:
        return match_pattern(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        return match_pattern(self.alpha_pattern, module, self.lora_alpha)

    def covers_layer(self, module: str) -> bool:
        """True unless `layers_to_transform` excludes the numbered layer of a module."""
        # In encoder.block.3.layer.0.SelfAttention.q PEFT counts the 3, and before 0.20.0 the 0.
        numbers = re.findall(r"\.(\d+)\.", module)
        if self.layers_to_transform in (None, ()) or not numbers:
            return True
        layers = self.layers_to_transform
        included = (layers,) if isinstance(layers, int) else layers
        return any(int(number) in included for number in numbers)

    def token_rows(self, module: str) -> tuple[int, ...]:
        """Rows of an embedding (by its Hugging Face name) that the adapter replaces.

        Raises:
            CheckpointError: trainable_token_indices does not name the module.
        """
        for name, rows in self.trainable_token_indices.items():
            if name == "" or module == name or module.endswith(f".{name}"):
                return rows
        raise CheckpointError(f"{module}.{DELTA}: trainable_token_indices does not name its module")

    def targets(self, module: str) -> bool:
        """True if target_modules, a list, names this module (by its Hugging Face name)."""
        return any(module == t or module.endswith(f".{t}") for t in self.target_modules)


def match_pattern(patterns: Mapping[str, Any], module: str, default: object) -> Any:
    """Value of the first pattern that matches the name or its end, as in PEFT."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_peft_config(path: Path, overrides: Mapping[str, Any] | None = None) -> PeftConfig:
    """Reads an adapter_config.json; `overrides` replace its fields."""
    raw = read_json(path, max_bytes=MAX_CONFIG_BYTES, error=ConfigError)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected an object")
    try:
        return parse_peft_config({**raw, **(overrides or {})})
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}") from None


def parse_peft_config(raw: Mapping[str, Any]) -> PeftConfig:
    """`read_peft_config` for the parsed JSON."""
    check_kind(raw)
    hints = typing.get_type_hints(PeftConfig)
    fields = hints.keys() - {"base", "narrowed"}
    known = {*fields, *INERT_ADAPTER_KEYS, *NARROWING, "peft_type", "bias", "init_lora_weights"}
    unknown = unknown_keys(raw, known, OFF_ADAPTER_KEYS)
    if unknown:
        raise UnsupportedError(
            f"{describe_keys(unknown)}: not implemented. To ignore a field all the same: "
            'load_adapter(..., config={"KEY": None})'
        )
    if raw.get("layers_pattern"):  # names the numbers that count; not followed here
        fields -= {"layers_to_transform"}
    present = {name: raw[name] for name in sorted(fields) if raw.get(name) is not None}
    values: dict[str, Any] = {
        name: check_patterns(name, value)
        if name in ("rank_pattern", "alpha_pattern")
        else check_token_rows(value)
        if name == "trainable_token_indices"
        else coerce(name, value, hints[name])
        for name, value in present.items()
    }
    base = raw.get("base_model_name_or_path")
    config = PeftConfig(
        **values,
        base=base if isinstance(base, str) else None,
        narrowed=any(raw.get(n) not in (None, "", []) for n in NARROWING),
    )
    check_size(config, "r")
    check_rate(config, "lora_dropout")
    if not config.target_modules:
        raise ConfigError("target_modules: missing or empty; it names the layers with LoRA")
    if not all(config.modules_to_save):
        raise ConfigError("modules_to_save: expected a list of module names, found an empty one")
    return config


def check_kind(raw: Mapping[str, Any]) -> None:
    """Raises UnsupportedError unless the adapter is plain LoRA of PEFT."""
    if "fine_tune_type" in raw or "lora_parameters" in raw:
        raise UnsupportedError(
            "fine_tune_type, lora_parameters: an adapter of MLX, which PEFT cannot read either; "
            "fuse it into the model with `mlx_lm.fuse`, and load the result"
        )
    if raw.get("peft_type") != "LORA":
        raise UnsupportedError(f"peft_type: {quoted(raw.get('peft_type'))}; jaxllm reads 'LORA'")
    if raw.get("bias", "none") != "none":
        raise UnsupportedError(
            f"bias: {quoted(raw['bias'])}; only 'none' is read: biases stay the base's"
        )
    if raw.get("init_lora_weights", True) not in KEEP_BASE:
        raise UnsupportedError(
            f"init_lora_weights: {quoted(raw['init_lora_weights'])} changes the base weights or "
            "the training; convert the adapter to plain LoRA with PEFT "
            "(save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )


def check_token_rows(value: Any) -> dict[str, tuple[int, ...]]:
    """Checks trainable_token_indices: a list of tokens, or such a list for each module."""
    named = value if isinstance(value, dict) else {"": value} if value else {}
    for rows in named.values():
        is_list = isinstance(rows, list) and bool(rows)
        if not is_list or not all(type(x) is int and x >= 0 for x in rows):
            raise ConfigError(
                f"trainable_token_indices: expected lists of token ids, found {quoted(value)}"
            )
    return {name: tuple(rows) for name, rows in named.items()}


def check_patterns(name: str, value: object) -> dict[str, Any]:
    """Checks rank_pattern or alpha_pattern: module names, with anchors at most, and numbers."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected an object, found {quoted(value)}")
    numbers = {}
    for pattern, number in value.items():
        if not PLAIN_PATTERN.fullmatch(pattern) or len(pattern) > 200:
            raise UnsupportedError(
                f"{name}: {quoted(pattern)} is more than a module name; regular expressions of a "
                "file are not run"
            )
        try:
            re.compile(pattern)
        except re.error as failure:
            raise ConfigError(f"{name}: {quoted(pattern)}: {failure}") from None
        if number is None:
            raise ConfigError(f"{name}[{pattern!r}]: expected a number, found null")
        numbers[pattern] = coerce(f"{name}[{pattern!r}]", number, int if name[0] == "r" else float)
        if name == "rank_pattern" and numbers[pattern] < 1:
            raise ConfigError(f"{name}[{pattern!r}]: expected a rank from 1 on, found {number}")
    return numbers
