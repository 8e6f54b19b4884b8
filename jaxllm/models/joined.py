"""Models whose projections of the same input are one matrix, for inference on a GPU.

The queries, keys and values of self-attention are one product, and so are gate and up of an MLP.
docs/decisions/gpu-programs.md says what that is worth.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array

from jaxllm.common.errors import InputError
from jaxllm.models.lora import module_at, replace_modules
from jaxllm.models.model import Model
from jaxllm.models.weights import JOINED, is_joined, parameters
from jaxllm.nn.linear import Linear, LinearPart
from jaxllm.parallel.placement import mesh_of, platform_of_arrays, wait_on_cpu_mesh
from jaxllm.parallel.sharding import FSDP, TENSOR

M = TypeVar("M", bound=Model[Any])
_FIRST = re.compile(r"(.*\.(attn|mlp))\.(q|gate)\.weight")


def arranged_for_inference(model: M) -> M:
    """The model of `join_projections` on a GPU, and the model itself elsewhere."""
    # PERF(gpu): docs/decisions/gpu-programs.md.
    return join_projections(model) if platform_of_arrays(model) == "gpu" else model


def join_projections(model: M) -> M:
    """The model with joined projections, for inference; the given model is used up.

    The weights that are joined are deleted, one sublayer after the other, so that memory for two
    copies of the model is not needed. These stay apart: layers with LoRA, quantized weights,
    weights of different dtypes, and weights that are sharded over `fsdp`. To save or train the
    model, call `split_projections` first.

    Args:
        model: a model, or the shapes of one. With tensor parallelism each device has its shard of
            each projection.
    """
    mesh, arrays = mesh_of(model), parameters(model)
    if mesh is not None and mesh.shape[FSDP] > 1:
        return model
    shards = 1 if mesh is None else mesh.shape[TENSOR]
    modules: dict[str, nnx.Module] = {}
    for path in arrays:
        if (found := _FIRST.fullmatch(path)) is None:
            continue
        parent, (name, parts) = found[1], JOINED[found[2]]
        layers = [getattr(module_at(model, parent), part) for part in parts]
        weights: list[Any]
        weights, biases = (
            [arrays.get(f"{parent}.{part}.{kind}") for part in parts] for kind in ("weight", "bias")
        )
        plain = all(type(layer) is Linear for layer in layers)
        if not (plain and _fit(weights, shards) and _fit(biases, shards)):
            continue
        rows = [weight.shape[0] // shards for weight in weights]
        bounds = itertools.pairwise(itertools.accumulate(rows, initial=0))
        for part, (start, stop) in zip(parts, bounds, strict=True):
            modules[f"{parent}.{part}"] = LinearPart(name, start, stop, shards, layers[0].dtype)
        joined = _joined(weights, shards), _joined(biases, shards)
        modules[f"{parent}.{name}"] = layers[0].with_arrays(*joined)
    return replace_modules(model, modules)


def split_projections(model: M) -> M:
    """A copy of a model of `join_projections` with the usual layers, whose weights are copies.

    Raises:
        InputError: joined weights are quantized.
    """
    modules: dict[str, nnx.Module] = {}
    wholes = dict.fromkeys(x.rpartition(".")[0] for x in parameters(model) if is_joined(x))
    for path in wholes:
        parent, _, name = path.rpartition(".")
        sublayer, whole = module_at(model, parent), module_at(model, path)
        if type(whole) is not Linear:
            raise InputError("split_projections: joined weights are quantized; load the model anew")
        for part in dict(JOINED.values())[name]:
            rows = getattr(sublayer, part).of
            bias = None if whole.bias is None else rows(whole.bias[...])
            arrays = wait_on_cpu_mesh((rows(whole.weight[...]), bias))
            modules[f"{parent}.{part}"] = whole.with_arrays(*arrays)
    model = replace_modules(model, modules)
    for path in wholes:
        parent, _, name = path.rpartition(".")
        delattr(module_at(model, parent), name)
    return model


def _fit(arrays: Sequence[Any], shards: int) -> bool:
    """True if the arrays can be rows of one: of one dtype and sharded alike, or none at all."""
    kinds = {None if x is None else (x.dtype, x.sharding, x.shape[0] % shards == 0) for x in arrays}
    return len(kinds) == 1 and all(kind is None or kind[2] for kind in kinds)


def _joined(arrays: Sequence[Any], shards: int) -> Any:
    """One array of the rows of several, which are deleted. None if there are none."""
    if arrays[0] is None:
        return None
    if isinstance(arrays[0], jax.ShapeDtypeStruct):
        whole = jax.eval_shape(partial(_join, shards=shards, sharding=None), arrays)
        return whole.update(sharding=arrays[0].sharding)
    named = isinstance(arrays[0].sharding, NamedSharding)
    sharding = arrays[0].sharding if named else None
    whole = wait_on_cpu_mesh(_join(arrays, shards=shards, sharding=sharding))
    for array in arrays:
        array.delete()
    return whole


@partial(jax.jit, static_argnames=("shards", "sharding"))
def _join(arrays: Sequence[Array], *, shards: int, sharding: NamedSharding | None) -> Array:
    parts = [x.reshape(shards, -1, *x.shape[1:]) for x in arrays]
    whole = jnp.concatenate(parts, axis=1).reshape(-1, *arrays[0].shape[1:])
    return whole if sharding is None else jax.lax.with_sharding_constraint(whole, sharding)
