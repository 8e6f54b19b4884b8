"""The texts of a call in buckets: the arrays that the compiled programs take.

Whatever is rounded up here (prompt columns, new tokens, slots) only changes how much padding a
program sees, never its result. The encoder's columns are rounded up where they are checked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.cache.variants import CacheKind
from jaxllm.common.errors import InputError
from jaxllm.generation.call.cache_settings import cache_kind, cache_slots
from jaxllm.generation.call.past_key_values import PastKeyValues, continuation
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET, PaddedBatch, last_real, pad_right
from jaxllm.generation.inputs.values import any_traced, bucket
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.lengths import MOST_COLUMNS
from jaxllm.generation.strategies.strategy import Prompt, Strategy


@dataclasses.dataclass(frozen=True)
class PreparedInputs:
    """What the model reads in a call, checked."""

    given: PaddedBatch
    """The decoder's prompt."""
    source: PaddedBatch | None
    """The encoder's input, of an encoder-decoder; in its bucket already."""
    encoder: dict[str, Any]
    """What `model.start` takes."""
    negative: PaddedBatch | None
    """The contexts that guidance leads away from."""
    token_types: Any
    """int32 [B, T], or None."""
    pad: int
    """Fills the buckets up."""

    @property
    def columns(self) -> int:
        """Of the longer one of prompt and negative prompt."""
        both = (self.given, self.negative)
        return max(columns.length for columns in both if columns is not None)

    @property
    def width(self) -> int:
        """`columns` in their bucket. A lone start token, T5's usual prompt, needs no padding."""
        return 1 if self.columns == 1 else bucket(self.columns, SMALLEST_BUCKET)

    def padded(self) -> PaddedBatch:
        """The decoder's prompt in its bucket."""
        return self.given.pad_to(self.width, self.pad)

    def inputs(self) -> dict[str, Any]:
        """What `model.decode` takes of the prompt in its bucket (`Prompt.inputs`)."""
        padded = self.padded()
        inputs: dict[str, Any] = {"tokens": padded.ids, "mask": padded.mask}
        if padded.embeds is not None:
            inputs["inputs_embeds"] = padded.embeds
        if self.token_types is not None:
            extra = self.width - self.given.length
            inputs["token_type_ids"] = pad_right(self.token_types, extra, 0)
        return inputs


def lay_out(
    texts: PreparedInputs,
    strategy: Strategy[Any],
    config: GenerationConfig,
    keys: Any,
    *,
    new: int,
    room: int,
    past: PastKeyValues | None,
    returns_past: bool,
) -> tuple[Prompt, int]:
    """The arrays of a call, and the slots of its cache.

    Args:
        new: most new tokens.
        room: their bucket.

    Raises:
        InputError: too many beams for a cache, or a conversation that `past` does not belong to.
    """
    sequences, mask, at = buffers(texts.padded(), room, texts.pad)
    inputs, cache = texts.inputs(), None
    used: Any = np.int32(texts.columns)
    capacity = texts.width + strategy.slots(room)
    if capacity > MOST_COLUMNS:
        raise InputError(
            f"num_beams: {config.num_beams} beams of {room} new tokens need {capacity} slots of "
            f"the cache, which has at most {MOST_COLUMNS}: lower one of the two"
        )
    if past is not None:
        name = "input_ids" if texts.source is None else "decoder_input_ids"
        more = continuation(past, texts.given, texts.pad, texts.token_types, name)
        if texts.negative is not None:  # new tokens stand behind both contexts
            more = more.behind(texts.negative.length, texts.width)
        inputs, at, used = more.inputs, more.at, more.columns
        capacity = more.capacity(strategy.slots(room), past.cache.capacity)
        for option in ("cache_implementation", "cache_config"):
            # One that the model's own file names has been heeded by the first call.
            if option in config.given and getattr(config, option) is not None:
                raise InputError(
                    f"{option}: past_key_values has a kind already; give one of the two"
                )
        # What a first call leaves has one length for all rows, what a later one does one for each.
        # `compact` sets it anew; here they are made alike, so that one program reads both.
        cache = past.cache.replace(length=past.cache.next_position)
    elif returns_past:
        capacity = bucket(capacity, SMALLEST_BUCKET)  # as the next call will have it
    # A later call of any strategy, and attentions column by column, need what left the window.
    ring = strategy.slides and not returns_past and not config.output_attentions
    kind = cache_kind(config, ring=ring) if past is None else CacheKind.like(past.cache)
    needed = int(np.max(used)) + strategy.slots(new)
    prompt = Prompt(
        inputs=inputs,
        encoder=texts.encoder,
        sequences=sequences,
        mask=mask,
        start_len=np.int32(texts.given.start_len),  # pyright: ignore[reportArgumentType]
        columns=used,
        at=at,
        keys=keys,
        kind=kind,
        past=cache,
    )
    return prompt, cache_slots(config, kind, capacity, needed)


def buffers(padded: PaddedBatch, room: int, pad: int) -> tuple[Any, Any, Any]:
    """`sequences` and `mask` [B, L] with room for the new tokens, and each row's last real column.

    Built on the host where the prompt is known, so that other lengths compile nothing.
    """
    host = jnp if any_traced(padded) else np
    known, at = host.asarray(padded.mask), last_real(padded.mask)
    if padded.ids is None:
        shape = (known.shape[0], room)
        return host.full(shape, pad, host.int32), host.zeros(shape, bool), at
    rest = ((0, 0), (0, room))
    sequences = host.pad(host.asarray(padded.ids), rest, constant_values=pad)
    return sequences, host.pad(known, rest), at
