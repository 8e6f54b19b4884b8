"""How hidden states become the vector of a text, as sentence-transformers computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.common.errors import InputError, listed, quoted
from jaxllm.nn.mlp import FUNCTIONS

NORMALIZE = "normalize"
"""The step that divides a vector by its length."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingRecipe:
    """The settings that make a vector of a text. Settings from files have the files' names."""

    pooling: tuple[str, ...] = ("mean",)
    """Kinds of pooling, whose vectors are concatenated."""
    steps: tuple[str, ...] = (NORMALIZE,)
    """What follows: `NORMALIZE`, or the name of the activation of the next dense layer."""
    dense: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """``linear.weight`` [out, in] and perhaps ``linear.bias`` [out] of each dense layer, in their
    order, by the layer's folder."""
    include_prompt: bool = True
    """False: the tokens of the prompt are not pooled."""
    prompts: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    default_prompt_name: str | None = None
    max_seq_length: int | None = None
    do_lower_case: bool = False
    files: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Contents of the files by name, such as ``"1_Pooling/config.json"``; without modules.json
    there are none."""
    problem: str | None = None
    """Why the files cannot be used. They matter only when the model embeds."""

    def prompt(self, name: str | None, text: str | None) -> str:
        """What is put before texts: `text` as it is, a prompt by its name, or the default one.

        Raises:
            InputError: both are given, or there is no such prompt.
        """
        if text is not None and name is not None:
            raise InputError("prompt_name cannot be combined with prompt; remove one of them")
        field = "default_prompt_name" if name is None else "prompt_name"
        name = self.default_prompt_name if name is None else name
        if text is not None or name is None:
            return text or ""
        if name not in self.prompts:
            known = listed(list(self.prompts)) or "none"
            raise InputError(f"{field}: no prompt is named {quoted(name)}; there is {known}")
        return self.prompts[name] or ""


def text_vectors(
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B T"],
    dense: Sequence[Mapping[str, Array]],
    *,
    pooling: tuple[str, ...],
    steps: tuple[str, ...],
) -> Float[Array, "B E"]:
    """Pools the hidden states of the tokens in `mask`, and applies the steps of a recipe."""
    x, weights = x.astype(jnp.float32), mask[..., None].astype(jnp.float32)
    x = jnp.concatenate([_pooled(x, weights, kind) for kind in pooling], axis=-1)
    layers = iter(dense)
    for step in steps:
        if step != NORMALIZE:
            layer = next(layers)
            bias = layer.get("linear.bias", jnp.zeros(1))
            x = FUNCTIONS[step](x @ layer["linear.weight"].T + bias[None])
            continue
        norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
        # Divided by an infinite norm, what is finite would be 0; the smallest norm is torch's.
        x = jnp.where(jnp.isfinite(norm), x / jnp.maximum(norm, 1e-12), jnp.nan)
    return x


def _pooled(
    x: Float[Array, "B T D"], weights: Float[Array, "B T 1"], kind: str
) -> Float[Array, "B D"]:
    """One kind of pooling; `weights` are 1 for the tokens that count, and 0 for the others."""
    rows, places = jnp.arange(x.shape[0]), jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)
    if kind == "max":
        return jnp.max(jnp.where(weights > 0, x, -jnp.inf), axis=1)
    if kind == "cls":
        return x[rows, jnp.argmax(weights[..., 0], axis=1)]
    if kind == "lasttoken":
        return x[rows, jnp.argmax(weights[..., 0] * places[None], axis=1)]
    if kind == "weightedmean":
        weights = weights * places[None, :, None]
    count = jnp.sum(weights, axis=1)
    return jnp.sum(x * weights, axis=1) / (jnp.sqrt(count) if "sqrt" in kind else count)
