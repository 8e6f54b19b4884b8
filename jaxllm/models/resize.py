"""Models with another number of token embeddings, for a tokenizer with added tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxllm.common.errors import InputError
from jaxllm.models.config import check_common
from jaxllm.models.weights import is_quantized, parameters, with_parameters
from jaxllm.nn.blocks import shallow_copy

if TYPE_CHECKING:
    from jaxllm.models.model import Model

M = TypeVar("M", bound="Model[Any]")


def resize_token_embeddings(model: M, size: int) -> M:
    """A copy of a model with ``size`` rows in its embedding, and in its LM head.

    A new row is the mean of the old ones, so that a new token is as probable as the others on
    average (Hewitt 2021, "Initializing new word embeddings for pretrained language models"). The
    other parameters are shared.

    Raises:
        InputError: a special token of the config would have no row, or quantized weights.
    """
    if is_quantized(model):
        raise InputError(
            f"resize_token_embeddings({size}): the weights are quantized; load the model without "
            "quantize="
        )
    config = dataclasses.replace(model.config, vocab_size=size)
    try:
        check_common(config)
    except ValueError as error:
        raise InputError(f"resize_token_embeddings({size}): {error}") from None
    old = model.config.vocab_size
    every = parameters(model)
    names = [name for name in every if name.split(".")[-2] in ("embed", "shared", "lm_head")]
    resized = with_parameters(model, {name: _resized(every[name], old, size) for name in names})
    if hasattr(resized, "backbone"):
        resized = shallow_copy(resized, backbone=shallow_copy(resized.backbone, config=config))
    return shallow_copy(resized, config=config)


def _resized(x: Float[jax.Array, "V D"], old: int, size: int) -> Float[jax.Array, "W D"]:
    """Rows of the tokens that stay, then rows of new tokens."""
    if size <= old:
        return x[:size]
    mean = jnp.mean(x.astype(jnp.float32), 0, keepdims=True).astype(x.dtype)
    return jnp.concatenate([x, jnp.broadcast_to(mean, (size - old, x.shape[1]))])
