"""`past_key_values`: what one call of generate() leaves for the next one of a conversation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import InputError
from jaxllm.generation.call.prompts import Sides, decoder_only_prompt, decoder_prompt
from jaxllm.generation.inputs.arguments import refuse
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET, PaddedBatch
from jaxllm.generation.inputs.values import any_traced, bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PastKeyValues:
    """The cache of a finished call, and the tokens that it holds keys and values of.

    Given to another call as `past_key_values`, with the whole conversation as `input_ids`, it saves
    reading the old part again. It is not used up: several conversations may branch off from it. A
    call copies what it needs, so let go of a handle that is no longer needed.
    """

    cache: Cache
    sequences: Int[Array, "B L"]
    mask: Bool[Array, "B L"]
    """Which of them are real tokens. The first ones of each row are in the cache, all but the
    newest (after contrastive search, all)."""
    encoder_ids: Int[Array, "B E"] | None = None
    """The input of an encoder-decoder, which some logits processors read, and assistants."""
    source_len: int | None = dataclasses.field(default=None, metadata={"static": True})
    """Columns of that input, without padding to a bucket."""
    config: Any = dataclasses.field(default=None, metadata={"static": True})
    """Of the model that it belongs to."""

    @property
    def nbytes(self) -> int:
        """Bytes that the cache takes."""
        return sum(x.nbytes for x in jax.tree.leaves(self.cache))

    def __repr__(self) -> str:
        rows, slots = self.cache.mask.shape
        return f"PastKeyValues({rows} rows, {slots} slots, {self.nbytes:,} bytes)"

    def tokens(self) -> list[Int[np.ndarray, " T"]]:
        """The tokens of each row that the cache holds."""
        host = jax.device_get((self.sequences, self.mask, self.cache.next_position))
        return [ids[real][:count] for ids, real, count in zip(*host, strict=True)]


@dataclasses.dataclass(frozen=True)
class Continuation:
    """The new columns of a conversation, padded on the right to a bucket."""

    inputs: dict[str, Any]
    """As `Prompt.inputs`."""
    at: Any
    """int32 [B]. The last real new column of each row."""
    columns: Int[np.ndarray, " B"]
    """Real tokens of each row, old and new, behind which the next ones stand."""
    slots: int
    """Slots that prefill needs, and the longest row before it."""

    def behind(self, columns: int, slots: int) -> Continuation:
        """With room before the new tokens for other contexts, of so many columns and slots."""
        return dataclasses.replace(
            self, columns=np.maximum(self.columns, columns), slots=max(self.slots, slots)
        )

    def capacity(self, new: int, held: int) -> int:
        """Slots for `new` tokens more. A larger cache is allocated only if `held` slots are few."""
        return max(bucket(max(self.slots, int(self.columns.max()) + new), SMALLEST_BUCKET), held)


def continued_sides(
    past: PastKeyValues,
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    *,
    config: Any,
    eos: tuple[int, ...],
    pad: int | None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Any = None,
    **others: Any,
) -> Sides:
    """The whole conversation, checked. An encoder is not run again, but that of an assistant."""
    refuse(others, "not beside past_key_values, which holds all that was read before")
    if past.config != model.config:
        raise InputError("past_key_values: comes from a model of another config")
    batch = past.cache.mask.shape[0]
    if not model.is_encoder_decoder:
        refuse(
            {
                "decoder_input_ids": decoder_input_ids,
                "decoder_attention_mask": decoder_attention_mask,
            },
            "this model has a decoder only",
        )
        if input_ids is None:
            raise InputError("input_ids: past_key_values needs the whole conversation")
        given = decoder_only_prompt(model, input_ids, attention_mask, None, config, eos, pad)
        _check_rows("input_ids", given, batch)
        return given, None, {}
    refuse(
        {"input_ids": input_ids, "attention_mask": attention_mask},
        "past_key_values holds what the encoder made of it; leave it out",
    )
    if decoder_input_ids is None:
        raise InputError("decoder_input_ids: past_key_values needs the whole decoder's side")
    given = decoder_prompt(model, decoder_input_ids, decoder_attention_mask, batch, config)
    ids = None if past.encoder_ids is None else np.asarray(past.encoder_ids)
    source = PaddedBatch(ids, np.asarray(past.cache.cross_mask), before=past.source_len)
    return given, source, {} if ids is None else {"input_ids": ids, "attention_mask": source.mask}


def continuation(
    past: PastKeyValues, given: PaddedBatch, pad: int, token_types: Any, name: str
) -> Continuation:
    """The columns of `given` that come after what the cache holds.

    Raises:
        InputError: a row does not begin with what the cache holds, with the column; or has nothing
            new.
    """
    if any_traced(past, given):
        raise InputError(
            "past_key_values: tokens are compared on the host; call generate outside jax.jit"
        )
    ids, mask = np.asarray(given.ids), np.asarray(given.mask)
    new: list[np.ndarray] = []
    for row, held in enumerate(past.tokens()):
        columns = np.flatnonzero(mask[row])
        text = ids[row, columns]
        shared = min(len(text), len(held))
        different = np.flatnonzero(text[:shared] != held[:shared])
        if different.size:
            first = different[0]
            raise InputError(
                f"{name}[{row}, {columns[first]}]: {text[first]}, but past_key_values holds "
                f"{held[first]} as token {first} of this row; give the conversation as it was"
            )
        if len(text) <= len(held):
            raise InputError(
                f"{name}: row {row} has {len(text)} tokens, of which past_key_values holds "
                f"{len(held)}; give the whole conversation, with one new token or more"
            )
        new.append(columns[len(held) :])
    width = bucket(max(map(len, new)), SMALLEST_BUCKET)
    fresh = np.arange(width) < np.array([[len(columns)] for columns in new])

    def pick(x: np.ndarray, filler: int) -> np.ndarray:
        picked = np.full(fresh.shape, filler, np.int32)
        for row, columns in enumerate(new):
            picked[row, : len(columns)] = x[row, columns]
        return picked

    inputs: dict[str, Any] = {"tokens": pick(ids, pad), "mask": fresh}
    if token_types is not None:
        inputs["token_type_ids"] = pick(np.asarray(token_types), 0)
    total, counts = mask.sum(axis=1), fresh.sum(axis=1)
    return Continuation(
        inputs=inputs,
        at=(counts - 1).astype(np.int32),
        columns=total.astype(np.int32),
        slots=int((total - counts).max()) + width,
    )


def checked_past(past: Any) -> PastKeyValues | None:
    if past is not None and not isinstance(past, PastKeyValues):
        raise InputError(
            "past_key_values: expected what an earlier call returned as `past_key_values`, found "
            f"{type(past).__name__}"
        )
    return past


def _check_rows(name: str, given: PaddedBatch, batch: int) -> None:
    if given.mask.shape[0] != batch:
        raise InputError(f"{name}: {given.mask.shape[0]} rows, but past_key_values has {batch}")
