"""Checked requests, and the checks of their decoder and encoder inputs on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.arguments import (
    INPUTS,
    SMALLEST_BUCKET,
    CallArguments,
    PaddedBatch,
    TokenRows,
    checked_embeds,
    checked_ids,
    checked_mask,
    needed_tokenizer,
    pad_right,
)
from jaxllm.generation.inputs.values import HostArray, bucket, is_traced
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models import input_checks as check
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers.tokenizer import Tokenizer

PromptTransform = Callable[
    [GenerativeModel, Tokenizer, TokenRows | None, TokenRows | None], tuple[TokenRows, TokenRows]
]
"""`(model, tokenizer, input_ids, attention_mask) -> (input_ids, attention_mask)`, on the host."""

PROMPT_TRANSFORMS: dict[str, PromptTransform] = {}
"""Prompt transforms by the boolean setting that enables each
(`registration.register_prompt_transform`)."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Prompts and the settings that they share, checked; strategies are built from it."""

    model: GenerativeModel
    config: GenerationConfig
    """Merged settings: of the call, its `generation_config` and the model."""
    eos: tuple[int, ...]
    """End tokens."""
    prompt: PaddedBatch
    """The decoder's prompts, not padded to a bucket."""
    max_length: int
    """Columns of the longest result, prompt included."""
    arguments: CallArguments = dataclasses.field(default_factory=CallArguments)
    """What the caller passed besides the settings."""
    encoder_input: PaddedBatch | None = None
    """The encoder's input, padded to its bucket; None for decoder-only models."""
    encoder_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Encoder inputs as `Decoder.init_cache` takes them."""
    negative: PaddedBatch | None = None
    """The unconditional contexts of classifier-free guidance."""
    token_type_ids: HostArray | None = None
    """int32 [B, T], or None."""
    pad: int = 0
    """Token id of finished rows, and of the columns that pad to a bucket."""

    @property
    def batch(self) -> int:
        """Number of prompts."""
        return self.prompt.rows

    @property
    def start_len(self) -> int:
        """Columns of the prompt, padding included; 0 for embeddings alone."""
        return self.prompt.start_len

    @property
    def max_new_tokens(self) -> int:
        return self.max_length - self.start_len

    @property
    def encoder_len(self) -> int | None:
        """Columns of the encoder's input without padding to a bucket; None for decoder-only
        models."""
        return None if self.encoder_input is None else self.encoder_input.unpadded

    @property
    def columns(self) -> int:
        """Columns of the prompt, or of the negative prompt if that is longer."""
        return max(self.prompt.length, 0 if self.negative is None else self.negative.length)

    @property
    def width(self) -> int:
        """Bucket of `columns`. A lone start token, T5's usual prompt, needs no padding."""
        return 1 if self.columns == 1 else bucket(self.columns, SMALLEST_BUCKET)

    def padded_prompt(self) -> PaddedBatch:
        """The decoder's prompt padded to its bucket."""
        return self.prompt.pad_to(self.width, self.pad)

    @property
    def new_token_bucket(self) -> int:
        """The limit of new tokens, rounded up."""
        return bucket(self.max_new_tokens, SMALLEST_BUCKET)

    def decoder_inputs(self, padded: PaddedBatch) -> dict[str, Any]:
        """The padded prompt as arguments of `Decoder.decode` (`PrefillInputs.decoder_inputs`)."""
        inputs: dict[str, Any] = {"tokens": padded.ids, "mask": padded.mask}
        if padded.embeds is not None:
            inputs["inputs_embeds"] = padded.embeds
        if self.token_type_ids is not None:
            extra = self.width - self.prompt.length
            inputs["token_type_ids"] = pad_right(self.token_type_ids, extra, 0)
        return inputs


def transformed_inputs(
    model: GenerativeModel, config: GenerationConfig, arguments: CallArguments
) -> CallArguments:
    """Applies the registered prompt transforms that the settings enable.

    Raises:
        InputError: a transform is enabled without a tokenizer, or together with an input that
            depends on the original prompt.
    """
    for field, transform in PROMPT_TRANSFORMS.items():
        if not getattr(config, field):
            continue
        tokenizer = needed_tokenizer(arguments.tokenizer, field)
        why = f"cannot be combined with {field}, which changes the prompt"
        others = (name for name in INPUTS if name not in ("input_ids", "attention_mask"))
        arguments.refuse((*others, "past_key_values"), why)
        ids, mask = transform(model, tokenizer, arguments.input_ids, arguments.attention_mask)
        arguments = dataclasses.replace(arguments, input_ids=ids, attention_mask=mask)
    return arguments


Inputs: TypeAlias = tuple[PaddedBatch, PaddedBatch | None, dict[str, Any]]
"""`prompt`, `encoder_input` and `encoder_arguments` of a `Request`."""


def seq2seq_inputs(
    model: GenerativeModel, inputs: CallArguments, config: GenerationConfig
) -> Inputs:
    """Inputs of an encoder-decoder: `input_ids` go to the encoder, `decoder_input_ids` are the
    decoder's prompt."""
    inputs.refuse(
        ("token_type_ids", "encoder_hidden_states", "encoder_attention_mask"),
        "not an input of an encoder-decoder",
    )
    encoder_input, arguments = encoder_inputs(model, inputs)
    prompt = decoder_prompt(
        model,
        inputs.decoder_input_ids,
        inputs.decoder_attention_mask,
        encoder_input.rows,
        config,
    )
    return prompt, encoder_input, arguments


def decoder_only_inputs(
    model: GenerativeModel,
    inputs: CallArguments,
    config: GenerationConfig,
    eos: tuple[int, ...],
    pad: int | None,
) -> Inputs:
    """Inputs of a decoder-only model; GPT-2 may attend to an encoder's hidden states."""
    refuse_encoder_inputs(inputs)
    prompt = decoder_only_prompt(model, inputs, config, eos, pad)
    states = inputs.encoder_hidden_states
    if states is None:
        inputs.refuse(("encoder_attention_mask",), "no encoder_hidden_states")
        return prompt, None, {}
    states = check.embeddings("encoder_hidden_states", states, model.config.width)
    if states.shape[0] != prompt.rows:
        raise InputError(f"encoder_hidden_states: {states.shape[0]} rows for {prompt.rows} prompts")
    mask = check.mask_of("encoder_attention_mask", inputs.encoder_attention_mask, states.shape[:2])
    return prompt, None, {"encoder_hidden_states": states, "encoder_attention_mask": mask}


def refuse_encoder_inputs(inputs: CallArguments) -> None:
    """Raises InputError for an input that only an encoder-decoder has."""
    inputs.refuse(
        ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs"),
        "this model has a decoder only",
    )


def decoder_only_prompt(
    model: GenerativeModel,
    inputs: CallArguments,
    config: GenerationConfig,
    eos: tuple[int, ...],
    pad: int | None,
) -> PaddedBatch:
    """The prompt of a decoder-only model: ids, embeddings, or a lone BOS token."""
    attention_mask = inputs.attention_mask
    embeds = inputs.inputs_embeds
    embeds = None if embeds is None else checked_embeds(embeds, model.config.width)
    if inputs.input_ids is None and embeds is None:
        bos = config.bos_token_id
        bos = model.config.bos_token_id if bos is None else bos
        if bos is None:
            raise InputError(
                "input_ids: none given, and the model has no bos_token_id to start from"
            )
        inputs.refuse(("attention_mask",), "given without input_ids")
        ids = checked_ids("bos_token_id", [[bos]], model.config.vocab_size)
        return PaddedBatch(ids, np.ones((1, 1), bool))
    if inputs.input_ids is None:
        assert embeds is not None
        return PaddedBatch(None, checked_mask(attention_mask, embeds.shape[:2]), embeds)
    ids = checked_ids("input_ids", inputs.input_ids, model.config.vocab_size)
    if embeds is not None and embeds.shape[:2] != ids.shape:
        raise InputError(f"inputs_embeds: expected {ids.shape} positions, found {embeds.shape[:2]}")
    if attention_mask is None:
        attention_mask = inferred_mask(ids, pad, eos)
    return PaddedBatch(ids, checked_mask(attention_mask, ids.shape), embeds)


def inferred_mask(ids: HostArray, pad: int | None, eos: tuple[int, ...]) -> HostArray | None:
    """Padding mask of ids given without one, as transformers infers it: pads are masked if the pad
    token is not an end token. None: every token is real."""
    return None if pad is None or pad in eos else ids != pad


def encoder_inputs(
    model: GenerativeModel, inputs: CallArguments
) -> tuple[PaddedBatch, dict[str, Any]]:
    """The encoder's input padded to its bucket, and the arguments of `Decoder.init_cache`.

    Without a mask every token is real, pads included, as in transformers 5. `encoder_outputs` are
    not padded; ids given with them are only read by logits processors.
    """
    ids, outputs = inputs.input_ids, inputs.encoder_outputs
    if ids is None and inputs.inputs_embeds is None and outputs is None:
        raise InputError("input_ids: an encoder-decoder needs the encoder's input")
    if outputs is not None:
        inputs.refuse(("inputs_embeds",), "has no effect beside encoder_outputs; drop it")
        states = last_hidden_state(outputs)
        states = check.embeddings("encoder_outputs", states, model.config.encoder_width)
        mask = checked_mask(inputs.attention_mask, states.shape[:2])
        if ids is not None:
            ids = checked_ids("input_ids", ids, model.config.vocab_size)
            if ids.shape != states.shape[:2]:
                raise InputError(
                    f"encoder_outputs: of {list(states.shape[:2])} tokens, but input_ids has "
                    f"{list(ids.shape)}"
                )
        encoder_input = PaddedBatch(ids, mask, states)
        return encoder_input, {"encoder_states": states, "attention_mask": jnp.asarray(mask)}
    if ids is not None and inputs.inputs_embeds is not None:
        raise InputError("input_ids, inputs_embeds: give exactly one of the two")
    if inputs.inputs_embeds is not None:
        embeds = checked_embeds(inputs.inputs_embeds, model.config.encoder_width)
        mask = checked_mask(inputs.attention_mask, embeds.shape[:2])
        encoder_input = PaddedBatch(None, mask, embeds)
    else:
        ids = checked_ids("input_ids", ids, model.config.vocab_size)
        encoder_input = PaddedBatch(ids, checked_mask(inputs.attention_mask, ids.shape))
    check.check_capacity(encoder_input.mask, None, model.config.max_positions)
    width = bucket(encoder_input.length, SMALLEST_BUCKET)
    encoder_input = encoder_input.pad_to(width, model.config.pad_token_id or 0)
    arguments = {"attention_mask": encoder_input.mask}
    if encoder_input.embeds is None:
        arguments["input_ids"] = encoder_input.ids
    else:
        arguments["inputs_embeds"] = encoder_input.embeds
    return encoder_input, arguments


def last_hidden_state(encoder_outputs: object) -> Any:
    """The encoder's last hidden state [B, E, D]: `encoder_outputs` itself, or taken from an output
    object, a mapping or a tuple."""
    if isinstance(encoder_outputs, Mapping):
        if "last_hidden_state" not in encoder_outputs:
            raise InputError("encoder_outputs: the mapping has no last_hidden_state")
        return encoder_outputs["last_hidden_state"]
    if isinstance(encoder_outputs, tuple | list) and encoder_outputs:
        return encoder_outputs[0]
    return getattr(encoder_outputs, "last_hidden_state", encoder_outputs)


def decoder_prompt(
    model: GenerativeModel,
    ids: TokenRows | None,
    mask: TokenRows | None,
    batch: int,
    config: GenerationConfig,
) -> PaddedBatch:
    """The decoder's prompt of an encoder-decoder: the start token, then the caller's ids.

    Args:
        ids: `decoder_input_ids` [B, T], or None.
        mask: `decoder_attention_mask` [B, T], or None: every token is real.
        batch: rows of the encoder's input.
    """
    start = config.decoder_start_token_id
    start = model.config.decoder_start_token_id if start is None else start
    start = config.bos_token_id if start is None else start
    if start is None:
        raise InputError("decoder_start_token_id: neither the call nor the model names one")
    start = np.asarray(start, np.int32).reshape(-1)
    if start.size not in (1, batch):
        raise InputError(f"decoder_start_token_id: {start.size} ids for a batch of {batch}")
    start = np.broadcast_to(start[:, None], (batch, 1))
    checked_ids("decoder_start_token_id", start, model.config.vocab_size)
    if ids is None:
        if mask is not None:
            raise InputError("decoder_attention_mask: given without decoder_input_ids")
        return PaddedBatch(np.array(start), np.ones((batch, 1), bool))
    host_ids = checked_ids("decoder_input_ids", ids, model.config.vocab_size)
    host_mask = checked_mask(mask, host_ids.shape, "decoder_attention_mask")
    if host_ids.shape[0] != batch:
        raise InputError(f"decoder_input_ids: {host_ids.shape[0]} rows for a batch of {batch}")
    if not is_traced(host_mask) and (np.diff(np.asarray(host_mask).astype(int), axis=1) < 0).any():
        # T5 measures distances between columns; a gap inside a row would change them.
        raise InputError("decoder_attention_mask: pad decoder prompts on the left")
    if is_traced(host_ids) or is_traced(host_mask):
        return PaddedBatch(host_ids, host_mask)
    return with_start(np.asarray(host_ids), np.asarray(host_mask), start)


def with_start(ids: np.ndarray, mask: np.ndarray, start: np.ndarray) -> PaddedBatch:
    """Prepends the start token [B, 1] to left-padded decoder prompts, unless some row begins with
    it already."""
    rows, begin = np.arange(len(ids)), np.argmax(mask, axis=1)
    if (ids[rows, begin] == start[:, 0]).any():
        return PaddedBatch(ids, mask)
    ids, mask = (np.concatenate([x[:, :1], x], axis=1) for x in (ids, mask))
    mask[:, 0] = False
    ids[rows, begin], mask[rows, begin] = start[:, 0], True
    return PaddedBatch(ids, mask)
