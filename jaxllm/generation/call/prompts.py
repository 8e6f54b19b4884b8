"""The two sides of a call: the decoder's prompt, and what an encoder reads; checked on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.arguments import refuse
from jaxllm.generation.inputs.padded_batch import (
    SMALLEST_BUCKET,
    PaddedBatch,
    check_width,
    checked_ids,
    checked_mask,
    floats,
)
from jaxllm.generation.inputs.values import bucket, is_traced
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models import input_checks as check

Sides = tuple[PaddedBatch, PaddedBatch | None, dict[str, Any]]
"""The decoder's prompt, the encoder's input, and the arguments of `model.start`."""

PromptTransform = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""`(model, tokenizer, input_ids, attention_mask) -> (input_ids, attention_mask)`, on the host."""

PROMPT_TRANSFORMS: dict[str, PromptTransform] = {}
"""By the boolean setting that asks for it (`registration.register_prompt_transform`)."""


def transformed_prompt(
    model: Any,
    config: GenerationConfig,
    tokenizer: Any,
    input_ids: Any,
    attention_mask: Any,
    others: Mapping[str, Any],
) -> tuple[Any, Any]:
    """`input_ids` and `attention_mask` after the registered transforms that the settings ask for.

    Args:
        tokenizer: of the call, or None.
        others: other inputs of the model, by name; a transformed prompt goes with none of them.
    """
    for field, transform in PROMPT_TRANSFORMS.items():
        if not getattr(config, field):
            continue
        if tokenizer is None:
            raise InputError(f"{field}: needs tokenizer=, the tokenizer of this model")
        refuse(others, f"not together with {field}, which changes the prompt")
        input_ids, attention_mask = transform(model, tokenizer, input_ids, attention_mask)
    return input_ids, attention_mask


def seq2seq_sides(
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    *,
    config: GenerationConfig,
    eos: tuple[int, ...],
    pad: int | None,
    inputs_embeds: Any = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Any = None,
    encoder_outputs: Any = None,
    **others: Any,
) -> Sides:
    """The inputs of an encoder-decoder, whose prompt goes to the encoder."""
    refuse(others, "not an input of an encoder-decoder")
    source, encoder = encoder_side(model, input_ids, attention_mask, inputs_embeds, encoder_outputs)
    batch = source.mask.shape[0]
    given = decoder_prompt(model, decoder_input_ids, decoder_attention_mask, batch, config)
    return given, source, encoder


def decoder_only_sides(
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    *,
    config: GenerationConfig,
    eos: tuple[int, ...],
    pad: int | None,
    inputs_embeds: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    **others: Any,
) -> Sides:
    """The inputs of a decoder-only model; GPT-2 may attend to an encoder's states."""
    refuse(others, "this model has a decoder only")
    given = decoder_only_prompt(model, input_ids, attention_mask, inputs_embeds, config, eos, pad)
    if encoder_hidden_states is None:
        refuse({"encoder_attention_mask": encoder_attention_mask}, "no encoder_hidden_states")
        return given, None, {}
    states, batch = jnp.asarray(encoder_hidden_states), given.mask.shape[0]
    if states.shape[0] != batch:
        raise InputError(f"encoder_hidden_states: {states.shape[0]} rows for {batch} prompts")
    mask = check.mask_of("encoder_attention_mask", encoder_attention_mask, states.shape[:2])
    return given, None, {"encoder_hidden_states": states, "encoder_attention_mask": mask}


def decoder_only_prompt(
    model, input_ids, attention_mask, inputs_embeds, config, eos, pad
) -> PaddedBatch:
    """The prompt of a decoder-only model: ids, embeddings, or a lone BOS."""
    embeds = None if inputs_embeds is None else floats(inputs_embeds)
    if embeds is not None:
        check_width("inputs_embeds", embeds, model.config.width)
    if input_ids is None and embeds is None:
        bos = config.bos_token_id
        bos = model.config.bos_token_id if bos is None else bos
        if bos is None:
            raise InputError(
                "input_ids: none given, and the model has no bos_token_id to start from"
            )
        refuse({"attention_mask": attention_mask}, "given without input_ids")
        return PaddedBatch(np.full((1, 1), bos, np.int32), np.ones((1, 1), bool))
    if input_ids is None:
        assert embeds is not None
        return PaddedBatch(None, checked_mask(attention_mask, embeds.shape[:2]), embeds)
    ids = checked_ids("input_ids", input_ids, model.config.vocab_size)
    if embeds is not None and embeds.shape[:2] != ids.shape:
        raise InputError(f"inputs_embeds: expected {ids.shape} positions, found {embeds.shape[:2]}")
    if attention_mask is None:
        attention_mask = inferred_mask(ids, pad, eos)
    return PaddedBatch(ids, checked_mask(attention_mask, ids.shape), embeds)


def inferred_mask(ids: Any, pad: int | None, eos: tuple[int, ...]) -> Any:
    """Without a mask: pads are masked if there is a pad token that ends no text (as transformers).

    A pad that is also an end token cannot be told from a real one; every token is then real.
    """
    return None if pad is None or pad in eos else ids != pad


def encoder_side(
    model, input_ids, attention_mask, inputs_embeds, encoder_outputs
) -> tuple[PaddedBatch, dict[str, Any]]:
    """The encoder's input in its bucket, and the arguments of `model.start`.

    Without a mask every token is real, pads too, as in transformers 5.
    """
    given = [x is not None for x in (input_ids, inputs_embeds, encoder_outputs)]
    if sum(given) == 0:
        raise InputError("input_ids: an encoder-decoder needs the encoder's input")
    if encoder_outputs is not None:
        refuse({"inputs_embeds": inputs_embeds}, "has no effect beside encoder_outputs; drop it")
        states = jnp.asarray(last_hidden_state(encoder_outputs))
        check_width("encoder_outputs", states, model.config.width)
        mask = checked_mask(attention_mask, states.shape[:2])
        ids = (
            None
            if input_ids is None
            else checked_ids("input_ids", input_ids, model.config.vocab_size)
        )
        if ids is not None and ids.shape != states.shape[:2]:
            raise InputError(
                f"encoder_outputs: of {list(states.shape[:2])} tokens, but input_ids has "
                f"{list(ids.shape)}"
            )
        source = PaddedBatch(ids, mask, states)
        return source, {"encoder_states": states, "attention_mask": jnp.asarray(mask)}
    if given[0] and given[1]:
        raise InputError("input_ids, inputs_embeds: give exactly one of the two")
    if inputs_embeds is not None:
        embeds = floats(inputs_embeds)
        check_width("inputs_embeds", embeds, model.config.width)
        source = PaddedBatch(None, checked_mask(attention_mask, embeds.shape[:2]), embeds)
    else:
        ids = checked_ids("input_ids", input_ids, model.config.vocab_size)
        source = PaddedBatch(ids, checked_mask(attention_mask, ids.shape))
    source = source.pad_to(bucket(source.length, SMALLEST_BUCKET), model.config.pad_token_id or 0)
    arguments = {"attention_mask": source.mask}
    arguments["input_ids" if source.embeds is None else "inputs_embeds"] = (
        source.ids if source.embeds is None else source.embeds
    )
    return source, arguments


def last_hidden_state(encoder_outputs: Any) -> Any:
    """The encoder's result from an output of ours, a mapping, a tuple that it leads, or itself."""
    if isinstance(encoder_outputs, Mapping):
        if "last_hidden_state" not in encoder_outputs:
            raise InputError("encoder_outputs: the mapping has no last_hidden_state")
        return encoder_outputs["last_hidden_state"]
    if isinstance(encoder_outputs, tuple | list):
        return encoder_outputs[0]
    return getattr(encoder_outputs, "last_hidden_state", encoder_outputs)


def decoder_prompt(model, ids, mask, batch: int, config: GenerationConfig) -> PaddedBatch:
    """What an encoder-decoder's decoder starts with: the start token, then the caller's ids."""
    start = config.decoder_start_token_id
    start = model.config.decoder_start_token_id if start is None else start
    start = config.bos_token_id if start is None else start
    if start is None:
        raise InputError("decoder_start_token_id: neither the call nor the model names one")
    first = np.asarray(start, np.int32).reshape(-1)
    if first.size not in (1, batch):
        raise InputError(f"decoder_start_token_id: {first.size} ids for a batch of {batch}")
    first = np.broadcast_to(first[:, None], (batch, 1))
    checked_ids("decoder_start_token_id", first, model.config.vocab_size)
    if ids is None:
        if mask is not None:
            raise InputError("decoder_attention_mask: given without decoder_input_ids")
        return PaddedBatch(np.array(first), np.ones((batch, 1), bool))
    ids = checked_ids("decoder_input_ids", ids, model.config.vocab_size)
    mask = checked_mask(mask, ids.shape, "decoder_attention_mask")
    if ids.shape[0] != batch:
        raise InputError(f"decoder_input_ids: {ids.shape[0]} rows for a batch of {batch}")
    if not is_traced(mask) and (np.diff(np.asarray(mask).astype(int), axis=1) < 0).any():
        # T5 measures distances between columns; a gap inside a row would change them.
        raise InputError("decoder_attention_mask: pad decoder prompts on the left")
    if is_traced(ids) or is_traced(mask):
        return PaddedBatch(ids, mask)
    return with_start(np.asarray(ids), np.asarray(mask), first)


def with_start(ids: np.ndarray, mask: np.ndarray, start: np.ndarray) -> PaddedBatch:
    """Decoder prompts, padded on the left, each behind its start token, unless some row has it."""
    rows, begin = np.arange(len(ids)), np.argmax(mask, axis=1)
    if (ids[rows, begin] == start[:, 0]).any():
        return PaddedBatch(ids, mask)
    ids, mask = (np.concatenate([x[:, :1], x], axis=1) for x in (ids, mask))
    mask[:, 0] = False
    ids[rows, begin], mask[rows, begin] = start[:, 0], True
    return PaddedBatch(ids, mask)
