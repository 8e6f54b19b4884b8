"""Keyword arguments of `generate`: the model's inputs, what strategies read, and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxllm.common.errors import InputError, UnsupportedError

# Arguments of transformers' generate() that are not fields of the config.
INPUTS = frozenset(
    {
        "inputs_embeds",
        "token_type_ids",
        "decoder_input_ids",
        "decoder_attention_mask",
        "encoder_outputs",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "logits_processor",
        "row_ids",
        "past_key_values",
        "return_past_key_values",
    }
)
# And those that only a strategy, a criterion or guidance reads (`select_strategy.Call.arguments`).
ARGUMENTS = frozenset(
    {
        *("assistant_model", "tokenizer", "stopping_criteria", "prefix_allowed_tokens_fn"),
        *("negative_prompt_ids", "negative_prompt_attention_mask"),
    }
)
UNSUPPORTED = {
    "assistant_tokenizer": "an assistant of another vocabulary",
    "synced_gpus": "synced devices",
    "position_ids": "giving positions (they follow from attention_mask)",
    "custom_generate": "custom_generate",
}

GENERATE_ARGUMENTS = INPUTS | ARGUMENTS | UNSUPPORTED.keys() | {"streamer"}
"""Every keyword argument of generate() that is no field of a config."""


class Keywords(NamedTuple):
    """Keyword arguments of a call, by who reads them."""

    inputs: dict[str, Any]
    arguments: dict[str, Any]
    settings: dict[str, Any]
    """All others: fields of `GenerationConfig`, which names those that it does not have."""


def sorted_keywords(fields: Mapping[str, Any]) -> Keywords:
    """Sorts them.

    Raises:
        UnsupportedError: an argument that only transformers has.
    """
    for name, feature in UNSUPPORTED.items():
        if fields.get(name) is not None and fields[name] is not False:
            raise UnsupportedError(f"{name}: {feature} is not supported")
    elsewhere = INPUTS | ARGUMENTS | UNSUPPORTED.keys()
    return Keywords(
        inputs={k: v for k, v in fields.items() if k in INPUTS},
        arguments={k: v for k, v in fields.items() if k in ARGUMENTS},
        settings={k: v for k, v in fields.items() if k not in elsewhere},
    )


def refuse(inputs: Mapping[str, Any], why: str) -> None:
    """Raises for the first input that was given, with the reason why it must not be."""
    for name, value in inputs.items():
        if value is not None:
            raise InputError(f"{name}: {why}")


def needed_tokenizer(arguments: Mapping[str, Any], field: str) -> Any:
    """The tokenizer of a call that has `field`, which does not work without one."""
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None:
        raise InputError(f"{field}: needs tokenizer=, the tokenizer of this model")
    return tokenizer


def processor_list(processors: Any) -> tuple[Any, ...]:
    """The caller's processors; transformers takes them as a list, and so do we."""
    if processors is None:
        return ()
    if not isinstance(processors, list | tuple):
        raise InputError(f"logits_processor: expected a list of callables, found {processors!r}")
    return tuple(processors)
