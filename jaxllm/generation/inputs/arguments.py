"""Keyword arguments of `generate`, split into call arguments and settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Array

from jaxllm.common.arguments import GENERATE, checked, drop_renamed
from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.models.decoder import GenerativeModel

T = TypeVar("T")
TokenRows: TypeAlias = Array | np.ndarray | Sequence[Sequence[int]] | Sequence[np.ndarray]
"""Token ids or masks: an array [B, T], or one sequence for each row."""


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """Arguments of a call besides its settings, as the caller passed them, before any check.

    B: batch size. T: prompt length. E: length of the encoder's input. D: model width.
    """

    input_ids: Any = None
    """int [B, T]: the prompt (decoder-only), or the encoder's input (encoder-decoder)."""
    attention_mask: Any = None
    """bool or 0/1 [B, T]: padding mask, 1 at real tokens."""
    inputs_embeds: Any = None
    """float [B, T, D]: prompt embeddings, instead of `input_ids`."""
    token_type_ids: Any = None
    """int [B, T] (GPT-2)."""
    decoder_input_ids: Any = None
    """int [B, T]: the decoder's prompt (encoder-decoder)."""
    decoder_attention_mask: Any = None
    """bool or 0/1 [B, T]."""
    encoder_outputs: Any = None
    """float [B, E, D], or an output or mapping that holds it as `last_hidden_state`."""
    encoder_hidden_states: Any = None
    """float [B, E, D] (GPT-2 with cross-attention)."""
    encoder_attention_mask: Any = None
    """bool or 0/1 [B, E]."""

    assistant_model: GenerativeModel | None = None
    """Smaller model with the same vocabulary that generates drafts."""
    tokenizer: Any = None
    stopping_criteria: Any = None
    """A list of callables."""
    logits_processor: Any = None
    """A list of callables."""
    prefix_allowed_tokens_fn: Any = None
    """`(batch_id, ids) -> token ids`."""
    negative_prompt_ids: Any = None
    """int [B, T]: unconditional contexts for classifier-free guidance."""
    negative_prompt_attention_mask: Any = None
    """bool or 0/1 [B, T]."""
    row_ids: Any = None
    """int [B]: row ids, which select the random numbers of each row."""
    past_key_values: Any = None
    """KV cache returned by an earlier call as `out.past_key_values`."""
    return_past_key_values: bool = False
    rope_length: Any = "batch"
    """"batch" or "row": the sequence length that dynamic and longrope RoPE use."""

    def refuse_inputs(self, why: str, *, except_: Collection[str]) -> None:
        """Raises InputError for the first input of the model that is given, with the reason `why`,
        unless it is named in `except_`."""
        refuse({name: getattr(self, name) for name in INPUTS if name not in except_}, why)


INPUTS = (
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "encoder_outputs",
    "encoder_hidden_states",
    "encoder_attention_mask",
)
"""Arguments that are inputs of the model."""
ARGUMENTS = frozenset(field.name for field in dataclasses.fields(CallArguments))
UNSUPPORTED = {
    "assistant_tokenizer": "an assistant of another vocabulary",
    "synced_gpus": "synced devices",
    "position_ids": "giving positions (they follow from attention_mask)",
    "custom_generate": "custom_generate",
}

GENERATE_ARGUMENTS = ARGUMENTS | UNSUPPORTED.keys() | {"streamer"}
"""Keyword arguments of generate() that are not config fields."""


def split_keywords(keywords: Mapping[str, Any]) -> tuple[CallArguments, dict[str, Any]]:
    """Splits the keyword arguments of a call into arguments and settings, the fields of
    `GenerationConfig`, which raises for unknown names.

    Raises:
        InputError: an argument of transformers' Flax classes that has another name here.
        UnsupportedError: an argument is supported by transformers only.
    """
    keywords = drop_renamed("generate()", keywords, GENERATE)
    for name, feature in UNSUPPORTED.items():
        if keywords.get(name) is not None and keywords[name] is not False:
            raise UnsupportedError(f"{name}: {feature} is not supported")
    flag = keywords.get("return_past_key_values", False)
    checked(flag, (bool, np.bool_), "return_past_key_values", "True or False")
    arguments = CallArguments(**{k: v for k, v in keywords.items() if k in ARGUMENTS})
    elsewhere = ARGUMENTS | UNSUPPORTED.keys()
    return arguments, {k: v for k, v in keywords.items() if k not in elsewhere}


def refuse(inputs: Mapping[str, Any], why: str) -> None:
    """Raises InputError for the first input that is not None, with the reason `why`."""
    for name, value in inputs.items():
        if value is not None:
            raise InputError(f"{name}: {why}")


def needed_tokenizer(tokenizer: T | None, field: str) -> T:
    """Returns the tokenizer; raises InputError if it is None, since `field` needs one."""
    if tokenizer is None:
        raise InputError(f"{field}: needs tokenizer=, the tokenizer of this model")
    return tokenizer


def processor_list(processors: object) -> tuple[Callable[..., Array], ...]:
    """Converts the caller's list of logits processors to a tuple; None gives ()."""
    if processors is None:
        return ()
    if not isinstance(processors, list | tuple):
        raise InputError(
            f"logits_processor: expected a list of callables, found {quoted(processors)}"
        )
    return tuple(processors)
