"""Result lengths, computed from the settings, the prompt and the model's position limit."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.common.errors import InputError, warn
from jaxllm.generation.inputs.padded_batch import PaddedBatch, check_positions
from jaxllm.generation.inputs.values import is_traced
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.decoder import GenerativeModel

MAX_COLUMNS = 2**20
DEFAULT_NEW_TOKENS = 256
"""New tokens of a text or answer, where neither the caller nor the model's files set a length."""


class Lengths(NamedTuple):
    """Maximum and minimum length of a row, prompt included."""

    max_length: int | Int[Array, ""]
    min_length: int | Int[Array, ""]


def resolve_lengths(
    config: GenerationConfig, prompt_len: int, max_positions: int | None = None
) -> Lengths:
    """Total lengths for a prompt of ``prompt_len`` tokens, padding included, as in transformers.

    ``max_new_tokens`` overrides ``max_length``. With neither, the maximum is 20 new tokens, but at
    most ``max_positions`` in total; lengths that were set are not reduced. ``min_new_tokens``
    overrides ``min_length``.

    Raises:
        InputError: the prompt alone reaches the maximum, or the minimum is above it.

    >>> resolve_lengths(GenerationConfig(max_new_tokens=5, min_new_tokens=2), prompt_len=10)
    Lengths(max_length=15, min_length=12)
    """
    settings = config.to_dict()
    if config.max_new_tokens is not None:
        if "max_length" in config.explicit:
            warn("`max_length` has no effect beside `max_new_tokens`")
        max_length = prompt_len + config.max_new_tokens
    elif "max_length" in settings:
        max_length = config.max_length
    else:
        max_length = prompt_len + config.max_length
        max_length = max_length if max_positions is None else min(max_length, max_positions)
    if config.min_new_tokens is not None:
        if "min_length" in config.explicit:
            warn("`min_length` has no effect beside `min_new_tokens`")
        min_length = prompt_len + config.min_new_tokens
    else:
        min_length = config.min_length

    if not is_traced(max_length):
        if prompt_len >= max_length == max_positions and "max_length" not in settings:
            raise InputError(
                f"the prompt has {prompt_len} tokens, but the model's context has {max_positions}: "
                "nothing can be generated; shorten it, or set `max_new_tokens`"
            )
        if prompt_len >= max_length:
            raise InputError(
                f"the prompt has {prompt_len} tokens, but `max_length` is {max_length}: "
                "nothing can be generated; raise it, or set `max_new_tokens`"
            )
        name = "min_length" if config.min_new_tokens is None else "min_new_tokens"
        # A minimum from a checkpoint's file does not forbid a call with a smaller maximum.
        if name in config.explicit and not is_traced(min_length) and min_length > max_length:
            raise InputError(
                f"`{name}` asks for at least {min_length} tokens in all, but the maximum is "
                f"{max_length}: lower it, or raise `max_new_tokens`"
            )
    return Lengths(max_length, min_length)


def checked_lengths(
    model: GenerativeModel, config: GenerationConfig, prompt: PaddedBatch
) -> tuple[GenerationConfig, int]:
    """Settings and `max_length`, checked, with lengths counted in columns of the result.

    A prompt of embeddings is not part of the result, so it takes none of these columns.
    """
    lengths = resolve_lengths(config, prompt.start_len, model.config.context_length)
    max_length = host_int("max_length", lengths.max_length)
    if prompt.ids is None and "max_length" in config.to_dict() and config.max_new_tokens is None:
        max_length -= prompt.length  # max_length counts the embedded prompt, which is not returned
        if max_length < 1:
            raise InputError("inputs_embeds: the prompt alone reaches max_length; raise it")
    min_length = config.min_length
    if prompt.ids is None and (is_traced(min_length) or min_length):  # counts the embeddings too
        min_length = min_length - prompt.length
        config = config.replace(
            min_length=jnp.maximum(min_length, 0) if is_traced(min_length) else max(min_length, 0)
        )
    if max_length > MAX_COLUMNS:
        raise InputError(
            f"max_length: {max_length} tokens, but a KV cache has room for {MAX_COLUMNS} at most: "
            "lower max_new_tokens or max_length"
        )
    check_positions(model, prompt, max_length - prompt.start_len)
    return config, max_length


def host_int(name: str, value: int | Int[Array, ""]) -> int:
    """Converts a length to a Python int; raises InputError for a tracer, since it sizes buffers."""
    if is_traced(value):
        raise InputError(f"{name}: must be a Python int, since it sizes the result; found a tracer")
    return int(value)


def with_default_length(
    fields: GenerationConfig,
    model: GenerativeModel,
    prompt_length: int,
    new_tokens: int = DEFAULT_NEW_TOKENS,
) -> GenerationConfig:
    """Sets max_new_tokens to `new_tokens` (less if the context is shorter) unless a length is set.

    The default of commands, batches and pipelines; that of ``generate`` is transformers' 20.
    """
    model_defaults = model.generation_config or GenerationConfig()
    if {"max_length", "max_new_tokens"} & model_defaults.merge(fields).to_dict().keys():
        return fields
    limit = new_tokens
    if not model.is_encoder_decoder and model.config.context_length is not None:
        limit = max(1, min(limit, model.config.context_length - prompt_length))
    return fields.replace(max_new_tokens=limit)
