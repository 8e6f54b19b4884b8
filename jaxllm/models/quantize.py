"""Models with quantized weights: which layers are quantized, and into what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.common.errors import InputError, quoted
from jaxllm.models.lora import check_plain, module_at, replace_modules
from jaxllm.models.model import Model
from jaxllm.models.weights import parameters
from jaxllm.nn.experts import ExpertLinear
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.quantized import (
    BlockMatrix,
    Int4Matrix,
    Int8Matrix,
    QuantizedEmbedding,
    QuantizedExpertLinear,
    QuantizedLinear,
    QuantizedMatrix,
)
from jaxllm.parallel.placement import wait_on_cpu_mesh

M = TypeVar("M", bound=Model[Any])
Quantize = Callable[[Float[Array, "O I"]], QuantizedMatrix]


def stackable(quantize: Quantize) -> Quantize:
    """`quantize` for a stack of matrices too, whose axis comes first in each of the arrays."""
    return lambda weight: (jax.vmap(quantize) if weight.ndim == 3 else quantize)(weight)


FORMATS: Mapping[str, Quantize] = {
    "int8": stackable(Int8Matrix.quantize),
    "int4": stackable(Int4Matrix.quantize),
}
"""Quantization of a float matrix [out, in], or of a stack of matrices, to each format."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """Arrays of a `BlockMatrix` of one of GGUF's types."""

    groups: str
    """Dtype of the integers."""
    size: int
    """Entries of a group."""
    scales: str
    """Dtype of scales and offsets that holds them exactly."""
    offsets: bool = False

    def shape(self, name: str, weight: Float[Array, "O I"]) -> BlockMatrix:
        """A matrix of zeros of a weight's shape."""
        rows, columns = weight.shape
        groups = jnp.zeros((columns // self.size, rows, self.size), self.groups)
        scales = jnp.zeros(groups.shape[:2], self.scales)
        return BlockMatrix(name, groups, scales, scales if self.offsets else None)


BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    "Q8_0": BlockFormat("int8", 32, "float16"),
    "Q4_0": BlockFormat("int4", 32, "float16"),
    "Q4_1": BlockFormat("uint4", 32, "float16", offsets=True),
    "Q4_K": BlockFormat("uint4", 32, "float32", offsets=True),
    "Q6_K": BlockFormat("int8", 16, "float32"),
}
"""Types of GGUF files whose blocks are loaded as they are."""

KEEP = "keep"
"""`quantize=` value of `load` that keeps the blocks of a GGUF file as they are."""

FLOAT_LAYERS = ("score", "positions", "table", "router")
"""Layers that stay float, by their names: a classifier's head, GPT-2's learned positions, the
relative biases of T5, which are small, and routers, whose choices would change."""
EMBEDDINGS = ("embed", "shared", "lm_head")
"""Token embeddings and LM heads, by their names."""


def layer_formats(model: Model[Any], name: str, *, embeddings: bool = True) -> dict[str, str]:
    """Format of every layer that is quantized, by the layer's path.

    Args:
        model: a float model, or the shapes of one.
        name: a key of `FORMATS`.
        embeddings: also quantize the token embedding and the LM head, to int8 at least: they have
            more effect on a model's answers than other layers.
    """
    if name not in FORMATS:
        known = FORMATS if name == KEEP else (*FORMATS, KEEP)  # which only `load` knows
        raise InputError(f"quantize: unknown {quoted(name)}; known: {', '.join(known)}")
    layers = quantized_layers(model, embeddings=embeddings)
    return {path: "int8" if path.rpartition(".")[2] in EMBEDDINGS else name for path in layers}


def quantized_layers(model: Model[Any], *, embeddings: bool) -> list[str]:
    """Paths of the layers that are quantized in a model, which has or gets quantized weights."""
    layers = []
    for path in parameters(model):
        layer = path.removesuffix(".weight")
        last = layer.rpartition(".")[2]
        if layer == path or last in FLOAT_LAYERS or (last in EMBEDDINGS and not embeddings):
            continue
        if isinstance(module_at(model, layer), Linear | Embedding | ExpertLinear):
            layers.append(layer)
    return layers


def quantize_model(model: M, name: str, *, embeddings: bool = True) -> M:
    """A copy of a float model with quantized weights, for inference; the rest is shared.

    Args:
        model: a float model without LoRA.
        name: "int8": a scale for each row of a matrix; "int4": also for each group of 32 entries,
            with int8 for embeddings.
        embeddings: also quantize the token embedding and the LM head.

    Raises:
        InputError: an unknown format, or the model has LoRA or is quantized already.
    """
    check_plain(model)
    formats = layer_formats(model, name, embeddings=embeddings)
    weights = parameters(model)
    matrices = {
        path: wait_on_cpu_mesh(FORMATS[name](weights[f"{path}.weight"]))
        for path, name in formats.items()
    }
    return with_matrices(model, matrices)


def quantized_shapes(model: M, formats: Mapping[str, str]) -> M:
    """The shapes of a model whose layers are quantized as `layer_formats` says."""
    weights = parameters(model)
    return with_matrices(
        model,
        {path: quantized_shape(name, weights[f"{path}.weight"]) for path, name in formats.items()},
    )


def quantized_shape(name: str, weight: Any) -> QuantizedMatrix:
    """The shapes of a weight's matrix in one of `FORMATS` or `BLOCK_FORMATS`, from its shape."""
    blocks = BLOCK_FORMATS.get(name)
    make = FORMATS[name] if blocks is None else stackable(partial(blocks.shape, name))
    return jax.eval_shape(make, weight)


def with_matrices(model: M, matrices: Mapping[str, QuantizedMatrix]) -> M:
    """A copy of a float model with quantized matrices in place of the layers' weights."""
    layers: dict[str, QuantizedEmbedding | QuantizedLinear | QuantizedExpertLinear] = {}
    for path, matrix in matrices.items():
        base = module_at(model, path)
        if isinstance(base, Embedding):
            layers[path] = QuantizedEmbedding(matrix, base)
        elif isinstance(base, ExpertLinear):
            layers[path] = QuantizedExpertLinear(matrix, base)
        else:
            layers[path] = QuantizedLinear(matrix, base)
    return replace_modules(model, layers)


def formats_of(model: Model[Any]) -> dict[str, str]:
    """Formats of a model's quantized layers by path; empty for a float model."""
    paths = (path.partition(".matrix.") for path in parameters(model))
    layers = dict.fromkeys(layer for layer, matrix, _ in paths if matrix)
    return {path: module_at(model, path).matrix.format for path in layers}
