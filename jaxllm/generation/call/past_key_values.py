"""`past_key_values`: the cache of a finished call, from which the next call of a conversation
continues."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.arguments import INPUTS, SMALLEST_BUCKET, CallArguments, PaddedBatch
from jaxllm.generation.inputs.values import any_traced, bucket
from jaxllm.generation.request import (
    Inputs,
    Request,
    decoder_only_prompt,
    decoder_prompt,
    refuse_encoder_inputs,
)
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import GenerativeModel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PastKeyValues:
    """KV cache of a finished call, and the tokens in it.

    Given to another call as `past_key_values`, with the whole conversation as `input_ids`, it saves
    the prefill of the old part. A call copies the cache and leaves this one unchanged: several
    conversations may continue from it. Delete it when it is no longer needed, to free its memory.
    """

    cache: Cache
    sequences: Int[Array, "B L"]
    """int32. Prompt and new tokens."""
    mask: Bool[Array, "B L"]
    """True at real tokens. The cache holds all of a row's tokens but the newest (after contrastive
    search, all)."""
    encoder_ids: Int[Array, "B E"] | None = None
    """The encoder's input ids, read by some logits processors and by assistants."""
    encoder_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Columns of the encoder's input, without padding to a bucket."""
    config: ModelConfig | None = dataclasses.field(default=None, metadata={"static": True})
    """Config of the model that computed the cache."""

    @property
    def nbytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(x.nbytes for x in jax.tree.leaves(self.cache))

    def __repr__(self) -> str:
        rows, slots = self.cache.mask.shape
        return f"PastKeyValues({rows} rows, {slots} slots, {self.nbytes:,} bytes)"

    def tokens(self) -> list[Int[np.ndarray, " _"]]:
        """Tokens of each row that are in the cache."""
        host = jax.device_get((self.sequences, self.mask, self.cache.next_position))
        return [ids[real][:count] for ids, real, count in zip(*host, strict=True)]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The new columns of a conversation, padded on the right to a bucket."""

    decoder_inputs: dict[str, Any]
    """Arguments of `Decoder.decode`, as in `PrefillInputs.decoder_inputs`."""
    last_column: Int[np.ndarray, " B"]
    """int32. The last real new column of each row."""
    cache_len: Int[np.ndarray, " B"]
    """int32. Columns of each row before the first new token, old and new."""
    prefill_slots: int
    """Slots that prefill needs: the most old tokens of any row, plus the bucket of new columns."""

    def capacity(self, new_slots: int, past_slots: int) -> int:
        """Cache slots for `new_slots` more; at least the present number `past_slots`."""
        needed = max(self.prefill_slots, int(self.cache_len.max()) + new_slots)
        return max(bucket(needed, SMALLEST_BUCKET), past_slots)


def continued_inputs(
    past: PastKeyValues,
    model: GenerativeModel,
    inputs: CallArguments,
    config: GenerationConfig,
    eos: tuple[int, ...],
    pad: int | None,
) -> Inputs:
    """The inputs of a call that continues from `past`: the whole conversation, checked.

    The encoder's output is in the cache; only an assistant encodes its input again.

    Raises:
        InputError: an input besides the conversation, or a cache of another model or batch size.
    """
    conversation = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    inputs.refuse(
        [name for name in INPUTS if name not in (*conversation, "token_type_ids")],
        "cannot be combined with past_key_values, whose cache holds the prompt",
    )
    if past.config != model.forward_config:
        raise InputError("past_key_values: comes from a model of another config")
    batch = past.cache.mask.shape[0]
    if not model.is_encoder_decoder:
        refuse_encoder_inputs(inputs)
        if inputs.input_ids is None:
            raise InputError("input_ids: missing; past_key_values needs the whole conversation")
        prompt = decoder_only_prompt(model, inputs, config, eos, pad)
        if prompt.rows != batch:
            raise InputError(f"input_ids: {prompt.rows} rows, but past_key_values has {batch}")
        return prompt, None, {}
    inputs.refuse(
        ("input_ids", "attention_mask"),
        "past_key_values holds what the encoder made of it; leave it out",
    )
    inputs.refuse(("token_type_ids",), "not an input of an encoder-decoder")
    ids, mask = inputs.decoder_input_ids, inputs.decoder_attention_mask
    if ids is None:
        raise InputError("decoder_input_ids: past_key_values needs the whole decoder's side")
    prompt = decoder_prompt(model, ids, mask, batch, config)
    encoder_ids = None if past.encoder_ids is None else np.asarray(past.encoder_ids)
    encoder_mask = np.asarray(past.cache.cross_mask)
    encoder_input = PaddedBatch(encoder_ids, encoder_mask, before=past.encoder_len)
    if encoder_ids is None:
        return prompt, encoder_input, {}
    return prompt, encoder_input, {"input_ids": encoder_ids, "attention_mask": encoder_mask}


def continuation(past: PastKeyValues, request: Request) -> Continuation:
    """The columns of a conversation that are not in the cache yet.

    Raises:
        InputError: a row does not begin with the tokens in the cache (the message names the
            column), or has no new token.
    """
    prompt, types = request.prompt, request.token_type_ids
    if any_traced(past, prompt):
        raise InputError(
            "past_key_values: tokens are compared on the host; call generate outside jax.jit"
        )
    ids, mask = np.asarray(prompt.ids), np.asarray(prompt.mask)
    name = "input_ids" if request.encoder_input is None else "decoder_input_ids"
    new_columns = _new_columns(past, ids, mask, name)
    counts = np.array([len(columns) for columns in new_columns])
    width = bucket(int(counts.max()), SMALLEST_BUCKET)

    def take_new(x: np.ndarray, filler: int) -> np.ndarray:
        new = np.full((len(new_columns), width), filler, np.int32)
        for row, columns in enumerate(new_columns):
            new[row, : len(columns)] = x[row, columns]
        return new

    decoder_inputs: dict[str, Any] = {
        "tokens": take_new(ids, request.pad),
        "mask": np.arange(width) < counts[:, None],
    }
    if types is not None:
        decoder_inputs["token_type_ids"] = take_new(np.asarray(types), 0)
    cache_len = mask.sum(axis=1)
    prefill_slots = int((cache_len - counts).max()) + width
    if request.negative is not None:  # new tokens come after both contexts
        cache_len = np.maximum(cache_len, request.negative.length)
        prefill_slots = max(prefill_slots, request.width)
    return Continuation(
        decoder_inputs=decoder_inputs,
        last_column=(counts - 1).astype(np.int32),
        cache_len=cache_len.astype(np.int32),
        prefill_slots=prefill_slots,
    )


def _new_columns(
    past: PastKeyValues, ids: np.ndarray, mask: np.ndarray, name: str
) -> list[np.ndarray]:
    """The columns of each row's tokens that are not in the cache; `name` is used in messages."""
    new_columns = []
    for row, past_tokens in enumerate(past.tokens()):
        columns = np.flatnonzero(mask[row])
        tokens = ids[row, columns]
        shared = min(len(tokens), len(past_tokens))
        different = np.flatnonzero(tokens[:shared] != past_tokens[:shared])
        if different.size:
            i = different[0]
            raise InputError(
                f"{name}[{row}, {columns[i]}]: {tokens[i]}, but past_key_values holds "
                f"{past_tokens[i]} as token {i} of this row; give the conversation as it was"
            )
        if len(tokens) <= len(past_tokens):
            raise InputError(
                f"{name}: row {row} has {len(tokens)} tokens, of which past_key_values holds "
                f"{len(past_tokens)}; give the whole conversation, with one new token or more"
            )
        new_columns.append(columns[len(past_tokens) :])
    return new_columns


def checked_past(past: object) -> PastKeyValues | None:
    """`past_key_values` of a call; raises InputError unless it is None or a `PastKeyValues`."""
    if past is not None and not isinstance(past, PastKeyValues):
        raise InputError(
            "past_key_values: expected what an earlier call returned as `past_key_values`, found "
            f"{type(past).__name__}"
        )
    return past
