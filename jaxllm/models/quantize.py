"""Models with quantized weights: which layers are quantized, and into what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jaxtyping import Array, Float

from jaxllm.common.errors import InputError
from jaxllm.common.messages import quoted
from jaxllm.models.lora import check_plain, module_at, replace_modules
from jaxllm.models.model import Model
from jaxllm.models.weights import parameters
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.quantized import (
    Int4Matrix,
    Int8Matrix,
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedMatrix,
)

M = TypeVar("M", bound=Model[Any])
Quantize = Callable[[Float[Array, "O I"]], QuantizedMatrix]

FORMATS: Mapping[str, Quantize] = {"int8": Int8Matrix.quantize, "int4": Int4Matrix.quantize}
"""Quantization of a float matrix [out, in] to each format."""

FLOAT_LAYERS = ("score", "positions", "table")
"""Layers that stay float, by their names: a classifier's head, GPT-2's learned positions, and the
relative biases of T5, which are small."""
EMBEDDINGS = ("embed", "shared", "lm_head")
"""Token embeddings and LM heads, by their names."""


def layer_formats(model: Model[Any], name: str, *, embeddings: bool = True) -> dict[str, str]:
    """Format of every layer that is quantized, by the layer's path.

    Args:
        model: a float model, or the shapes of one.
        name: a key of `FORMATS`.
        embeddings: also quantize the token embedding and the LM head, to int8 at least: they have
            more effect on a model's answers than other layers.

    Raises:
        InputError: an unknown format.
    """
    if name not in FORMATS:
        raise InputError(f"quantize: unknown {quoted(name)}; known: {', '.join(FORMATS)}")
    formats = {}
    for path in parameters(model):
        layer = path.removesuffix(".weight")
        last = layer.rpartition(".")[2]
        if layer == path or last in FLOAT_LAYERS or (last in EMBEDDINGS and not embeddings):
            continue
        if isinstance(module_at(model, layer), Linear | Embedding):
            formats[layer] = "int8" if last in EMBEDDINGS else name
    return formats


def quantize_model(model: M, name: str, *, embeddings: bool = True) -> M:
    """A copy of a float model with quantized weights, for inference; the rest is shared.

    Args:
        name: "int8": a scale for each row of a matrix; "int4": also for each group of 32 entries,
            with int8 for embeddings.
        embeddings: also quantize the token embedding and the LM head.

    Raises:
        InputError: an unknown format, or the model has LoRA or is quantized already.
    """
    check_plain(model)
    formats = layer_formats(model, name, embeddings=embeddings)
    weights = parameters(model)
    return with_matrices(
        model, {path: FORMATS[name](weights[f"{path}.weight"]) for path, name in formats.items()}
    )


def quantized_shapes(model: M, formats: Mapping[str, str]) -> M:
    """The shapes of a model whose layers are quantized as `layer_formats` says."""
    weights = parameters(model)
    matrices = {
        path: jax.eval_shape(FORMATS[name], weights[f"{path}.weight"])
        for path, name in formats.items()
    }
    return with_matrices(model, matrices)


def with_matrices(model: M, matrices: Mapping[str, QuantizedMatrix]) -> M:
    """A copy of a float model with quantized matrices in place of the layers' weights."""
    layers: dict[str, QuantizedEmbedding | QuantizedLinear] = {}
    for path, matrix in matrices.items():
        base = module_at(model, path)
        if isinstance(base, Embedding):
            layers[path] = QuantizedEmbedding(matrix, base)
        else:
            layers[path] = QuantizedLinear(matrix, base)
    return replace_modules(model, layers)


def formats_of(model: Model[Any]) -> dict[str, str]:
    """Formats of a model's quantized layers by path; empty for a float model."""
    paths = (path.partition(".matrix.") for path in parameters(model))
    layers = dict.fromkeys(layer for layer, matrix, _ in paths if matrix)
    return {path: module_at(model, path).matrix.format for path in layers}
