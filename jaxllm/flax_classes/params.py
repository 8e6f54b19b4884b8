"""Parameters as a nested dict with the names and layouts of transformers' Flax classes.

Scripts read this tree: masks of weight decay look for ``("ln_f", "scale")``, partition rules for
``("q", "kernel")``. It is computed from the weight table of the family, whose tensor names the Flax
classes share but for the last part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Shaped

from jaxllm.common.errors import InputError, quoted
from jaxllm.models.model import Model
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weights import Entry, is_quantized, parameters, with_parameters

Path = tuple[str, ...]
_EMBEDDINGS = ("embed.weight", "positions.weight", "shared.weight", "table.weight")


def flax_params(model: Model[Any]) -> dict[str, Any]:
    """The model's parameters as the tree of transformers' Flax class."""
    own = parameters(model)
    return unflatten_dict(
        {
            path: _join(entry, [own[name] for name in entry.parameters])
            for path, entry in _entries(model).items()
        }
    )


def with_flax_params(model: Model[Any], params: Mapping[str, Any]) -> Any:
    """A copy of the model with the parameters of `flax_params`; arrays may be traced."""
    entries = _entries(model)
    if not isinstance(params, Mapping):
        raise InputError(f"params: expected a nested dict of arrays, found {quoted(params)}")
    flat: dict[Path, Any] = dict(flatten_dict(params))
    for problem, paths in (("missing", entries.keys() - flat), ("unknown", flat.keys() - entries)):
        if paths:
            names = sorted("/".join(map(str, path)) for path in paths)
            raise InputError(f"params: {problem}: {', '.join(names[:3])} ({len(names)} in all)")
    own = parameters(model)
    changed: dict[str, Array] = {}
    for path, entry in entries.items():
        values = _split(entry, jnp.asarray(flat[path]))
        for name, value in zip(entry.parameters, values, strict=True):
            if value.shape != own[name].shape:
                raise InputError(
                    f"params: {'/'.join(path)} has shape {flat[path].shape}, which does not fit"
                    f" {name} {own[name].shape}"
                )
            changed[name] = value
    return with_parameters(model, changed)


def copy_of_tree(params: Any) -> Any:
    """The same arrays in new dicts."""
    return jax.tree.map(lambda x: x, params)


def same_arrays(first: Any, second: Any) -> bool:
    """True for trees of the very same arrays."""
    leaves, structure = jax.tree.flatten(first)
    others, other = jax.tree.flatten(second)
    return structure == other and all(a is b for a, b in zip(leaves, others, strict=True))


def _entries(model: Model[Any]) -> dict[Path, Entry]:
    """Entries of the family's weight table by their paths in the tree."""
    if is_quantized(model):
        raise InputError("params: the weights are quantized; load the model without quantize=")
    own = parameters(model)
    family = next(each for each in FAMILIES.values() if each.config is type(model.config))
    table = family.table(model.config)
    headless = type(model).__name__ in family.parts
    prefix = table.prefix if headless else ""
    return {
        tuple(_path(entry, own, entry.tensor.removeprefix(prefix))): entry
        for entry in table.for_model(own)
    }


def _path(entry: Entry, own: Mapping[str, Any], tensor: str) -> Iterator[str]:
    """The parts of a tensor's name, the last one by Flax's names."""
    *modules, leaf = tensor.split(".")
    yield from modules
    first = entry.parameters[0]
    if leaf != "weight":
        yield leaf
    elif first.endswith(_EMBEDDINGS):
        yield "embedding"
    elif own[first].ndim == 2:
        yield "kernel"
    else:  # LayerNorm has a scale and a bias, RMSNorm one weight
        yield "scale" if first.removesuffix("weight") + "bias" in own else "weight"


def _is_dense(entry: Entry, ndim: int) -> bool:
    """Whether Flax's kernel is [in, out]: that of a Dense. GPT-2's Conv1D is [out, in], as ours."""
    return ndim == 2 and not entry.transposed and not entry.parameters[0].endswith(_EMBEDDINGS)


def _join(entry: Entry, values: list[Shaped[Array, " ..."]]) -> Shaped[Array, " ..."]:
    whole = entry.whole(jnp.concatenate(values) if len(values) > 1 else values[0])
    return whole.T if _is_dense(entry, whole.ndim) else whole


def _split(entry: Entry, whole: Shaped[Array, " ..."]) -> list[Shaped[Array, " ..."]]:
    whole = whole.T if _is_dense(entry, whole.ndim) else whole
    return entry.parts(whole)
