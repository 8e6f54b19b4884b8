"""Builds the strategy of assisted generation from the settings of a call, on the host."""

from __future__ import annotations

import numpy as np

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.inputs.arguments import ModelInputs, refuse
from jaxllm.generation.inputs.padded_batch import PaddedBatch, check_positions
from jaxllm.generation.inputs.values import bucket, float_leaf, int_leaf
from jaxllm.generation.settings.config import GenerationConfig, draft_options
from jaxllm.generation.strategies.assisted.assisted import Assisted
from jaxllm.generation.strategies.assisted.drafts import (
    AssistantModel,
    Draft,
    EarlyExit,
    PromptLookup,
)
from jaxllm.models.decoder import GenerativeModel, checked_generative

SMALLEST_DRAFT = 8
DEFAULT_NGRAM_SIZE = 2


def build_assisted(
    model: GenerativeModel,
    config: GenerationConfig,
    assistant_model: GenerativeModel | None,
    *,
    max_new_tokens: int,
    max_length: int,
) -> Assisted:
    """Builds the strategy of assisted generation, with its draft.

    Args:
        max_length: columns of the longest result, prompt included.

    Raises:
        InputError: two drafts at once, or more layers than the model has.
        UnsupportedError: an assistant that does not fit the model.
    """
    options = draft_options(config, assistant_model)
    if len(options) > 1:
        raise InputError(f"{', '.join(options)}: give one of them; a call has one draft")
    if config.dola_layers is not None:
        raise UnsupportedError(
            f"{options[0]}: DoLa (dola_layers) takes no draft; drop one of the two"
        )
    check_rotary(model, options[0], max_length)
    weight = config.assistant_ensemble_weight
    if options[0] == "prompt_lookup_num_tokens":
        if weight is not None:
            raise UnsupportedError(
                "assistant_ensemble_weight: mixes the model with its draft's distribution, which a "
                "prompt lookup does not have; drop one of the two"
            )
        assert config.prompt_lookup_num_tokens is not None
        num_tokens, grows = config.prompt_lookup_num_tokens, False
        draft: Draft = prompt_lookup(config)
    else:
        settings = assistant_settings(config, assistant_model)
        num_tokens = settings.num_assistant_tokens
        grows = settings.num_assistant_tokens_schedule in ("heuristic", "heuristic_transient")
        draft = network_draft(model, settings, assistant_model)
    longest = bucket(2 * num_tokens if grows else num_tokens, SMALLEST_DRAFT)
    return Assisted(
        draft=draft,
        num_assistant_tokens=int_leaf("generate()", "num_assistant_tokens", num_tokens),
        grows=np.bool_(grows),  # pyright: ignore[reportArgumentType]
        sampling=bool(config.do_sample),
        max_draft=min(longest, bucket(max_new_tokens, SMALLEST_DRAFT)),
        num_return_sequences=config.num_return_sequences,
        ensemble_weight=None
        if weight is None
        else float_leaf("generate()", "assistant_ensemble_weight", weight, "(0, 1)"),
    )


def network_draft(
    model: GenerativeModel, settings: GenerationConfig, assistant_model: GenerativeModel | None
) -> Draft:
    """The draft of an assistant model, or of the model's own first layers."""
    threshold = float_leaf(
        "generate()",
        "assistant_confidence_threshold",
        settings.assistant_confidence_threshold,
        "[0, 1]",
    )
    if assistant_model is not None:
        check_assistant(model, assistant_model)
        return AssistantModel(assistant_model, threshold)
    assert settings.assistant_early_exit is not None
    model.early_exit(settings.assistant_early_exit)  # raises if there are fewer layers
    return EarlyExit(settings.assistant_early_exit, threshold)


def prompt_lookup(config: GenerationConfig) -> PromptLookup:
    size = config.max_matching_ngram_size
    size = DEFAULT_NGRAM_SIZE if size is None else size
    return PromptLookup(int_leaf("generate()", "max_matching_ngram_size", size, least=1))


def assistant_settings(
    config: GenerationConfig, assistant_model: GenerativeModel | None
) -> GenerationConfig:
    """Length, schedule and threshold of drafts: the call's, or else the assistant's own.

    transformers reads all three from the assistant's generation_config alone.
    """
    assistant_config = getattr(assistant_model, "generation_config", None)
    names = (
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    )
    if assistant_config is None:
        return config
    assistants = {n: getattr(assistant_config, n) for n in names if n not in config.explicit}
    return config.replace(**assistants)


def check_assistant(model: GenerativeModel, assistant: GenerativeModel) -> None:
    """Raises UnsupportedError if the assistant's vocabulary or inputs differ from the model's."""
    assistant = checked_generative(assistant, "assistant_model")
    if assistant.is_encoder_decoder != model.is_encoder_decoder:
        raise UnsupportedError(
            f"assistant_model: {type(assistant).__name__} does not read what "
            f"{type(model).__name__} reads: one of them is an encoder-decoder"
        )
    sizes = assistant.config.vocab_size, model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UnsupportedError(
            f"assistant_model: its vocabulary has {sizes[0]} tokens and the model's {sizes[1]}; "
            "both need the same (assistant_tokenizer is not supported)"
        )


def check_assistant_inputs(
    assistant: GenerativeModel,
    model: GenerativeModel,
    prompt: PaddedBatch,
    inputs: ModelInputs,
    new: int,
) -> None:
    """Raises InputError for inputs that the assistant cannot take.

    Args:
        inputs: the inputs of the call, before the checks.
        new: limit of new tokens.
    """
    if type(assistant) is not type(model):
        only_ours = {
            "token_type_ids": inputs.token_type_ids,
            "encoder_hidden_states": inputs.encoder_hidden_states,
        }
        refuse(only_ours, "cannot be combined with an assistant_model of another family")
    check_positions(assistant, prompt, new, whose="assistant_model")


def check_rotary(model: GenerativeModel, option: str, max_length: int) -> None:
    """Raises UnsupportedError if the model's RoPE depends on the length so far, which would count
    drafted tokens that are rejected later."""
    rope = getattr(model.config, "rotary", None)
    limits = {"dynamic": "max_positions", "longrope": "original_positions"}
    if rope is None or rope.rope_type not in limits:
        return
    limit = getattr(rope, limits[rope.rope_type])
    if max_length > limit:
        raise UnsupportedError(
            f"{option}: beyond {limit} positions this model's RoPE ({rope.rope_type}) depends on "
            f"the length so far, rejected drafts included; lower max_length ({max_length}), or "
            "drop the draft"
        )
