"""Merges the settings of a call: its fields, `generation_config`, the model's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jaxllm.common.arguments import checked
from jaxllm.common.errors import InputError, warn
from jaxllm.generation.inputs.values import any_traced
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.resolve import (
    UnusedFieldWarning,
    check_consistent,
    check_for_use,
    token_tuple,
)
from jaxllm.models.decoder import GenerativeModel


def merged_config(
    model: GenerativeModel,
    generation_config: GenerationConfig | Mapping[str, Any] | None,
    fields: Mapping[str, Any],
    assistant_model: GenerativeModel | None = None,
) -> tuple[GenerationConfig, tuple[int, ...]]:
    """Merged settings of a call, and its end tokens.

    A field of the call overrides `generation_config`, which overrides the model's own generation
    config. If neither of the first two sets `eos_token_id`, all end tokens of the model's files
    apply.
    """
    if generation_config is None:
        generation_config = GenerationConfig()
    elif isinstance(generation_config, Mapping):
        for name in generation_config:
            checked(name, (str,), "generation_config", "names of fields")
        generation_config = GenerationConfig(**generation_config)
    elif not isinstance(generation_config, GenerationConfig):
        raise InputError(
            f"generation_config: expected a GenerationConfig, found {type(generation_config)}"
        )
    explicit = generation_config.merge(GenerationConfig(**fields))
    for name, value in explicit.to_dict().items():
        if FIELDS[name].static and any_traced(value):
            raise InputError(f"{name}: must be known outside jax.jit; found a tracer")
    if model.card is None:
        check_explicit(model, explicit)
        model_defaults = GenerationConfig()
    else:
        model_defaults = model.card.generation_config or GenerationConfig()
    config = check_for_use(model_defaults.merge(explicit))
    check_consistent(config, assistant_model)
    for name, value in config.to_dict().items():
        if (provider := FIELDS[name].provider) and value is not FIELDS[name].neutral:
            import_module(provider)
    if "decoder_start_token_id" in config.explicit and not model.is_encoder_decoder:
        name = "decoder_start_token_id"
        message = f"`{name}` has no effect: this model has a decoder only"
        warn(UnusedFieldWarning(message, name))
    if "eos_token_id" in explicit.to_dict():
        return config, token_tuple(config.eos_token_id)
    card = model.checked_card("generate")
    own = token_tuple(model_defaults.eos_token_id)
    end_tokens = (*own, *card.config.eos_token_ids, *card.tokenizer_eos)
    known = tuple(dict.fromkeys(i for i in end_tokens if 0 <= i < model.config.vocab_size))
    if card.unknown_eos and not known:
        warn(
            f"no end token: {', '.join(map(str, card.unknown_eos))}, which the model's files name, "
            "is not in its vocabulary, so every row has the maximum length; give eos_token_id="
        )
    return config, known


def check_explicit(model: GenerativeModel, fields: GenerationConfig) -> None:
    """Checks that a call sets what a model without a card cannot know: end and pad token, length.

    Raises:
        InputError: a setting is missing.
    """
    given = {*fields.to_dict()}
    if model.forward_config.pad_token_id is not None:
        given.add("pad_token_id")
    if "max_length" in given:
        given.add("max_new_tokens")
    names = ("eos_token_id", "pad_token_id", "max_new_tokens")
    missing = [name for name in names if name not in given]
    if missing:
        raise InputError(
            f"{', '.join(missing)}: not given, and unknown, because this model came out of a JAX "
            "transformation, which keeps the weights but not the settings of its files; give a "
            "value to each, or use model.with_card(original.card)"
        )
