"""Adds LoRA to layers of a model, and merges it into the weights.

Patterns select modules by either of two names: our path
(``backbone.stack.blocks.0.attn.q``) and Hugging Face's (``model.layers.0.self_attn.q_proj``).
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxllm.common.errors import InputError
from jaxllm.models.decoder_only import SequenceClassifier
from jaxllm.models.model import Model
from jaxllm.models.registry import FAMILIES, architecture_of
from jaxllm.models.weights import Entry, Table, is_quantized, parameters
from jaxllm.nn.experts import ExpertLinear, Router
from jaxllm.nn.linear import Linear
from jaxllm.nn.lora import LoraLinear, row_norms
from jaxllm.parallel.placement import mesh_of, put_tree, wait_on_cpu_mesh

ALL_LINEAR = "all-linear"
HEADS = ("lm_head", "score")

M = TypeVar("M", bound=Model[Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA settings: target modules, rank, scale, dropout, variants.

    Args:
        rank: r, the rank of the updates.
        alpha: each update is multiplied by ``alpha / rank``.
        dropout: dropout rate on the input of each update, in training.
        targets: regular expressions, each matching the full name of a module or its end after a
            dot: ``"attn.(q|v)"`` of our paths, ``"q_proj"`` of Hugging Face's names.
            ``"all-linear"``: every Linear except the head and experts, which have no LoRA. GPT-2's
            ``"c_attn"`` is q, k and v, which share an A.
        rslora: multiply by ``alpha / sqrt(rank)`` instead.
        dora: also train a magnitude per row of the weights.
        modules_to_save: more modules, named like targets, that are fully trained: embeddings,
            norms, heads. A classifier's `score` always is.

    >>> LoraConfig(rank=4, targets="q_proj").targets
    ('q_proj',)
    """

    rank: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False
    dora: bool = False
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("targets", "modules_to_save"):
            object.__setattr__(self, name, patterns_of(name, getattr(self, name)))
        if not self.targets:
            raise InputError(f"targets: name at least one module, or {ALL_LINEAR!r}")
        for name in ("rslora", "dora"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}: expected true or false, found {getattr(self, name)!r}")
        check_number("rank", self.rank, int, lambda x: x >= 1, "an integer from 1 on")
        check_number("alpha", self.alpha, float, lambda x: 0 < x < math.inf, "a number above 0")
        check_number("dropout", self.dropout, float, lambda x: 0 <= x < 1, "a rate in [0, 1)")


def patterns_of(name: str, value: object) -> tuple[str, ...]:
    """One pattern or several as a tuple, checked to be regular expressions."""
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise InputError(f"{name}: expected patterns of module names, found {value!r}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as failure:
            raise InputError(
                f"{name}: {pattern!r} is not a regular expression ({failure})"
            ) from None
    return tuple(patterns)


def check_number(
    name: str, value: object, kind: type[int] | type[float], fits: Callable[[Any], bool], what: str
) -> None:
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value):
        raise InputError(f"{name}: expected {what}, found {value!r}")


def add_lora(
    model: M, config: LoraConfig | None = None, *, key: int | Array = 0, share_a: bool = True
) -> M:
    """Adds LoRA to the config's targets; the new model computes the same until it is trained.

    `model` is unchanged and shares its arrays. New parameters are float32: A is uniform in
    ±1/sqrt(in), PEFT's ``kaiming_uniform(a=sqrt(5))``, B is zero, magnitudes are the norms of the
    weights' rows. Each A depends only on the key and the path of the layer that has it.

    Args:
        model: a model of any family, without LoRA.
        config: None: `LoraConfig()`.
        key: seed or key of the random A.
        share_a: train one A for all layers whose weights are one matrix in the checkpoint, as PEFT
            does (GPT-2's q, k and v); False: one A for each layer.

    Returns:
        The model; `modules_to_save` of its card are the paths of the modules that are fully
        trained.

    Raises:
        InputError: a pattern matches no module (the error lists the existing ones), or the model
            already has LoRA.
    """
    config = LoraConfig() if config is None else config
    check_plain(model)
    names = module_names(model)
    patterns = config.modules_to_save
    if isinstance(model, SequenceClassifier):
        patterns = (*patterns, "score")
    saved = select("modules_to_save", patterns, names)
    check_no_experts(model, names, config)
    linears = {path: names[path] for path in names if isinstance(module_at(model, path), Linear)}
    chosen = [path for path in select("targets", config.targets, linears) if path not in saved]
    if not chosen:
        raise InputError("targets: all that they match is in modules_to_save, so trained whole")
    key = jax.random.key(key) if isinstance(key, int) else key
    layers, mesh = {}, mesh_of(model)
    shared = layers_with_a(model, chosen) if share_a else {}
    for path in chosen:
        base = module_at(model, path)
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        layer = new_layer(base, config, shared.get(path, own))
        layers[path] = layer if mesh is None else put_tree(layer, mesh, path=path)
    return with_lora(model, layers, saved)


def layers_with_a(model: Model[Any], paths: Iterable[str]) -> dict[str, str]:
    """Names of the layers whose A other layers of the same module share, by the other layer's
    path."""
    paths, shared = set(paths), dict[str, str]()
    for entry in base_entries(model):
        first, *others = [path for path in entry.modules if path in paths] or [""]
        shared |= dict.fromkeys(others, first.rpartition(".")[2])
    return shared


def check_no_experts(model: Model[Any], names: Mapping[str, str], config: LoraConfig) -> None:
    """Raises InputError for targets that are experts or a router, or experts in modules_to_save.

    ``"all-linear"`` does not name them: neither does PEFT's, since they are parameters without a
    linear layer in transformers 5.
    """
    kinds = {"targets": (ExpertLinear, Router), "modules_to_save": ExpertLinear}
    for field, kind in kinds.items():
        own = {path: hf for path, hf in names.items() if isinstance(module_at(model, path), kind)}
        for pattern in getattr(config, field):
            found = () if pattern == ALL_LINEAR else matching(pattern, own)
            if found:
                raise InputError(
                    f"{field}: {pattern!r} names {own[min(found)]}; adapters of experts and of "
                    "routers are not implemented: name other layers, such as those of attention"
                )


def new_layer(base: Linear, config: LoraConfig, a: Array | str) -> LoraLinear:
    """LoRA with B zero, so that the layer's output is unchanged.

    Args:
        a: key of a random A, or the name of the layer that has it.
    """
    outputs, inputs = base.weight[...].shape
    if not isinstance(a, str):
        bound = inputs**-0.5
        a = jax.random.uniform(a, (config.rank, inputs), minval=-bound, maxval=bound)
    return LoraLinear(
        base,
        a,
        jnp.zeros((outputs, config.rank)),
        alpha=config.alpha,
        rslora=config.rslora,
        dropout_rate=config.dropout,
        magnitude=wait_on_cpu_mesh(row_norms(base.weight[...])) if config.dora else None,
    )


def with_lora(model: M, layers: Mapping[str, LoraLinear], saved: Iterable[str]) -> M:
    """Replaces layers by their LoRA versions and sets `modules_to_save` of the card."""
    model.checked_card("add_lora")
    return replace_modules(model, layers).with_card(modules_to_save=tuple(saved))


def merge_lora(model: M) -> M:
    """Merges LoRA into the weights; the result is a plain model, which `save_hf` can write.

    Sums are in float32; each weight keeps its dtype, so a half-precision one is rounded.
    """
    layers = lora_layers(model)
    if not layers:
        raise InputError("merge_lora: the model has no LoRA")
    merged = {
        path: wait_on_cpu_mesh(layer.merged(module_at(model, path.rpartition(".")[0])))
        for path, layer in layers.items()
    }
    model = replace_modules(model, merged)
    return model if model.card is None else model.with_card(modules_to_save=None)


def lora_layers(model: Model[Any]) -> dict[str, LoraLinear]:
    """The layers with LoRA by path."""
    paths = (p.removesuffix(".lora_b") for p in parameters(model) if p.endswith(".lora_b"))
    return {path: module_at(model, path) for path in paths}


def check_plain(model: Model[Any]) -> None:
    """Raises InputError unless the model's layers are plain: without LoRA, not quantized."""
    if lora_layers(model):
        raise InputError("the model has LoRA already; merge_lora makes a plain one of it")
    if is_quantized(model):
        raise InputError("the model's weights are quantized; load it without quantize=")


def replace_modules(model: M, modules: Mapping[str, nnx.Module]) -> M:
    """Replaces the modules at these paths in a copy of the model; all arrays are shared."""
    card = model.card
    model = jax.tree.map(lambda x: x, model)
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        setattr(module_at(model, parent), name, module)
    return model if card is None else model.with_card(card)


def module_at(model: Model[Any], path: str) -> Any:
    """The module at a path such as ``backbone.stack.blocks.0.attn``; the model itself at ""."""
    module: Any = model
    for part in path.split(".") if path else ():
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    return module


def table_of(model: Model[Any]) -> Table:
    """The weight table of the model's family."""
    return FAMILIES[architecture_of(model)[0]].table(model.config)


def base_entries(model: Model[Any]) -> list[Entry]:
    """Table entries of the model's tensors, without the LoRA parameters."""
    paths = (p for p in parameters(model) if not p.rpartition(".")[2].startswith("lora_"))
    return table_of(model).for_model(paths)


def module_names(model: Model[Any]) -> dict[str, str]:
    """Our path -> Hugging Face's name, for every module that directly has parameters."""
    return {
        path.rpartition(".")[0]: entry.tensor.rpartition(".")[0]
        for entry in base_entries(model)
        for path in entry.parameters
    }


def select(field: str, patterns: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """Paths of the modules that any pattern matches, in the model's order."""
    selected = set()
    for pattern in patterns:
        if field == "targets" and pattern == ALL_LINEAR:
            matched = {path for path in names if path not in HEADS}
        else:
            matched = matching(pattern, names)
        if not matched:
            known = dict.fromkeys(
                _layers_as_i(path) + f" ({_layers_as_i(hf)})" for path, hf in names.items()
            )
            raise InputError(
                f"{field}: {pattern!r} matches no module; there are {', '.join(known)}"
            )
        selected |= matched
    return [path for path in names if path in selected]


def matching(pattern: str, names: Mapping[str, str]) -> set[str]:
    """Paths of the modules that a pattern matches, by our name or by Hugging Face's."""
    whole = re.compile(rf"(?:.*\.)?(?:{pattern})")
    return {path for path, hf in names.items() if any(map(whole.fullmatch, (path, hf)))}


def _layers_as_i(name: str) -> str:
    return re.sub(r"\.\d+\.", ".{i}.", name, count=1)
