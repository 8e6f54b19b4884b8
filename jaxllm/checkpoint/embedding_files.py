"""Reads and writes the files of sentence-transformers (of versions 2 to 5) in a model's folder."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from jaxllm.checkpoint.hub import MODULES
from jaxllm.checkpoint.load import MAX_JSON_BYTES, read_config_file
from jaxllm.checkpoint.safetensors import write_sharded
from jaxllm.checkpoint.source import check_repetitions, read_tensor
from jaxllm.checkpoint.weight_files import is_plain_file_name, open_weights
from jaxllm.common.errors import ConfigError, JaxLLMError, UnsupportedError, quoted, warn
from jaxllm.common.files import is_there, make_folder, read_json, write_json
from jaxllm.common.validation import from_plain
from jaxllm.models.embedding import NORMALIZE, EmbeddingRecipe

T = TypeVar("T")
Kind = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
_TEXTS = ("sentence_bert_config.json", "config_sentence_transformers.json")
_ORDER = (("Transformer",), ("Pooling",), ("Dense", "Normalize", "Dropout"))
"""Modules that may come first, second and later."""
_ACTIVATIONS = {
    **{"Identity": "linear", "Tanh": "tanh", "ReLU": "relu", "ReLU6": "relu6", "GELU": "gelu"},
    **{"Sigmoid": "sigmoid", "SiLU": "silu", "Mish": "mish", "LeakyReLU": "leaky_relu"},
}
"""Names of activations in jaxllm by the names of torch's classes."""


@dataclasses.dataclass(frozen=True)
class _Module:
    type: str
    path: str
    name: str | None = None
    idx: int | None = None

    @property
    def kind(self) -> str:
        """The class; of another package than sentence_transformers with the package."""
        package, _, name = self.type.rpartition(".")
        return name if package.startswith("sentence_transformers.") else self.type


@dataclasses.dataclass(frozen=True)
class _Pooling:
    embedding_dimension: int | None = None
    word_embedding_dimension: int | None = None  # in version 2, as the flags in the order of `Kind`
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    pooling_mode: Kind | tuple[Kind, ...] | None = None
    include_prompt: bool = True


@dataclasses.dataclass(frozen=True)
class _Dense:
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.Tanh"
    module_input_name: Literal["sentence_embedding"] = "sentence_embedding"
    module_output_name: Literal["sentence_embedding"] | None = None


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Fields of the files `_TEXTS`."""

    max_seq_length: int | None = None
    do_lower_case: bool = False
    unpad_inputs: bool | None = None
    transformer_task: Literal["feature-extraction"] | None = None
    module_output_name: Literal["token_embeddings"] | None = None
    modality_config: dict[Literal["text"], dict[str, str]] | None = None
    prompts: dict[str, str | None] = dataclasses.field(default_factory=dict)
    default_prompt_name: str | None = None
    model_type: Literal["SentenceTransformer"] = "SentenceTransformer"
    similarity_fn_name: str | None = None


def read_embedding_recipe(folder: Path) -> EmbeddingRecipe | None:
    """What the files of sentence-transformers say; None without modules.json.

    Files that cannot be used are no error here, as the model may do other work than embedding: the
    reason is the `problem` of the recipe.
    """
    if not os.path.lexists(folder / MODULES):
        return None
    try:
        return _read(folder)
    except JaxLLMError as error:
        return EmbeddingRecipe(problem=str(error))


def _read(folder: Path) -> EmbeddingRecipe:
    files: dict[str, Any] = {}

    def read(schema: type[T], *names: str) -> T:
        """Reads the fields of one object from several JSON files."""
        for name in names:
            files[name] = read_config_file(folder / name)
        fields = {key: value for name in names for key, value in files[name].items()}
        fields.pop("__version__", None)
        return _plain(schema, fields, folder / " and ".join(names))

    files[MODULES] = read_json(folder / MODULES, max_bytes=MAX_JSON_BYTES)
    modules = _plain(tuple[_Module, ...], files[MODULES], folder / MODULES)
    first = dict(reversed([(module.path, number) for number, module in enumerate(modules)]))
    for number, module in enumerate(modules):
        is_placed = is_plain_file_name(module.path, "") and first[module.path] == number
        if module.kind not in _ORDER[min(number, 2)] or not is_placed or modules[0].path:
            raise UnsupportedError(
                f"{folder / MODULES}: module {number} is {quoted(module.type)} in "
                f"{quoted(module.path)}; jaxllm reads Transformer in '', then Pooling, and then "
                "Dense, Normalize and Dropout, each in a folder of its own beside this file"
            )
    if len(modules) < 2:
        raise UnsupportedError(f"{folder / MODULES}: expected a Pooling, found none")
    pooling = read(_Pooling, f"{modules[1].path}/config.json")
    flags = [value for name, value in vars(pooling).items() if name.startswith("pooling_mode_")]
    stated = [kind for kind, flag in zip(get_args(Kind), flags, strict=True) if flag]
    kinds = pooling.pooling_mode or tuple(stated) or "mean"
    steps: list[str] = []
    dense: dict[str, Any] = {}
    for module in modules[2:]:
        if module.kind == "Normalize":
            steps.append(NORMALIZE)
        elif module.kind == "Dense":
            layer = read(_Dense, f"{module.path}/config.json")
            activation, dense[module.path] = _dense(layer, folder / module.path)
            steps.append(activation)
    texts = read(_Texts, *[name for name in _TEXTS if is_there(folder / name, ConfigError)])
    return EmbeddingRecipe(
        pooling=(kinds,) if isinstance(kinds, str) else kinds,
        steps=tuple(steps),
        dense=dense,
        include_prompt=pooling.include_prompt,
        prompts=texts.prompts,
        default_prompt_name=texts.default_prompt_name,
        max_seq_length=texts.max_seq_length,
        do_lower_case=texts.do_lower_case,
        files=files,
    )


def _plain(schema: type[T], content: object, where: Path) -> T:
    try:
        return from_plain(schema, content)
    except ConfigError as error:
        raise UnsupportedError(f"{where}: {error}") from None


def _dense(layer: _Dense, folder: Path) -> tuple[str, dict[str, np.ndarray]]:
    """The activation of a dense layer, and its parameters, checked for their names and shapes."""
    package, _, name = layer.activation_function.rpartition(".")
    if not f"{package}.".startswith("torch.nn.") or name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{folder}/config.json: activation_function: expected {', '.join(_ACTIVATIONS)} of "
            f"torch.nn, found {quoted(layer.activation_function)}"
        )
    with open_weights(folder) as source:
        check_repetitions(source, source.names())
        tensors = {name: read_tensor(source, name) for name in source.names()}
    expected: dict[str, Any] = {"linear.weight": (layer.out_features, layer.in_features)}
    expected |= {"linear.bias": (layer.out_features,)} if layer.bias else {}
    if (found := {name: x.shape for name, x in tensors.items()}) != expected:
        raise UnsupportedError(f"{folder}: config.json implies {expected}, found {found}")
    return _ACTIVATIONS[name], tensors


def write_embedding_files(folder: Path, recipe: EmbeddingRecipe | None) -> None:
    """Writes the files of a recipe; without one, removes modules.json of a replaced model."""
    if recipe is None or recipe.problem is not None:
        (folder / MODULES).unlink(missing_ok=True)
        if recipe is not None:
            warn(f"{folder}: saved without modules.json, which cannot be used ({recipe.problem})")
        return
    for path, tensors in recipe.dense.items():
        make_folder(folder / path)
        write_sharded(folder / path, tensors)
    for name, content in recipe.files.items():
        make_folder((folder / name).parent)
        write_json(folder / name, content)
