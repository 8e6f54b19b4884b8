"""The arrays of a call in buckets, as the compiled programs take them, and the size of its cache.

Whatever is rounded up here (prompt columns, new tokens, slots) only changes how much padding a
program sees, never its result. The encoder's columns are rounded up where they are checked.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.cache.variants import PLAIN, CacheKind
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.call.past_key_values import PastKeyValues, continuation
from jaxllm.generation.call.prompts import PreparedInputs
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET, PaddedBatch, last_token_columns
from jaxllm.generation.inputs.values import any_traced, bucket, int_leaf
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.lengths import MOST_COLUMNS
from jaxllm.generation.strategies.strategy import Prompt, Strategy


@dataclasses.dataclass(frozen=True)
class Layout:
    """A call in its buckets."""

    prompt: Prompt
    capacity: int
    """Slots of the cache."""
    new_token_bucket: int
    """The limit of new tokens, rounded up."""


def lay_out(
    inputs: PreparedInputs,
    strategy: Strategy[Any],
    config: GenerationConfig,
    keys: Any,
    *,
    max_new_tokens: int,
    past: PastKeyValues | None,
    keep_cache: bool,
) -> Layout:
    """The arrays of a call in buckets.

    Args:
        keys: random keys, one for each sample of each row.
        past: the cache of an earlier call, which holds the beginning of the prompt.
        keep_cache: the cache will be returned (`return_past_key_values`).

    Raises:
        InputError: too many beams for a cache, or a conversation that `past` does not belong to.
    """
    new_token_bucket = bucket(max_new_tokens, SMALLEST_BUCKET)
    new_slots = strategy.slots(new_token_bucket)
    capacity = inputs.width + new_slots
    if capacity > MOST_COLUMNS:
        raise InputError(
            f"num_beams: {config.num_beams} beams of {new_token_bucket} new tokens need {capacity} "
            f"slots of the cache, which has at most {MOST_COLUMNS}: lower one of the two"
        )
    sequences, mask, last_column = sequence_buffers(
        inputs.padded_prompt(), new_token_bucket, inputs.pad
    )
    cache_len: Any = np.int32(inputs.columns)
    past_cache = None
    if past is None:
        # A later call of any strategy, and attentions column by column, need the columns that have
        # left the window.
        ring = strategy.allows_ring_cache and not keep_cache and not config.output_attentions
        kind = cache_kind(config, ring=ring)
        decoder_inputs = inputs.decoder_inputs()
        if keep_cache:
            capacity = bucket(capacity, SMALLEST_BUCKET)  # the size that the next call will have
    else:
        _refuse_cache_settings(config)
        new = continuation(past, inputs)
        decoder_inputs, cache_len = new.decoder_inputs, new.cache_len
        last_column: Any = new.last_column
        capacity = new.capacity(new_slots, past.cache.capacity)
        kind = CacheKind.like(past.cache)
        # The cache of a first call has one length for all rows, that of a later call has one a row.
        # `compact` sets it anew; here they are made alike, so that one program reads both.
        past_cache = past.cache.replace(length=past.cache.next_position)
    prompt = Prompt(
        decoder_inputs=decoder_inputs,
        encoder_inputs=inputs.encoder_arguments,
        sequences=sequences,
        mask=mask,
        start_len=np.int32(inputs.prompt.start_len),  # pyright: ignore[reportArgumentType]
        cache_len=cache_len,
        last_column=last_column,
        keys=keys,
        cache_kind=kind,
        past_cache=past_cache,
    )
    needed = int(np.max(cache_len)) + strategy.slots(max_new_tokens)
    return Layout(prompt, cache_slots(config, kind, capacity, needed), new_token_bucket)


def _refuse_cache_settings(config: GenerationConfig) -> None:
    """Raises for a kind of cache that was asked for in code, beside a cache that has one. A kind
    that the model's own file names was applied by the first call."""
    for option in ("cache_implementation", "cache_config"):
        if option in config.given and getattr(config, option) is not None:
            raise InputError(f"{option}: past_key_values has a kind already; give one of the two")


def sequence_buffers(padded: PaddedBatch, new_token_bucket: int, pad: int) -> tuple[Any, Any, Any]:
    """Buffers in which the result grows, and the last real column of each row's prompt.

    Built on the host where the prompt is known, so that other lengths compile nothing.

    Returns:
        `sequences` int32 [B, L], `mask` bool [B, L] and the columns int32 [B]. L is the width of
        the prompt's ids (0 for embeddings alone) and `new_token_bucket`.
    """
    host = jnp if any_traced(padded) else np
    known, last_column = host.asarray(padded.mask), last_token_columns(padded.mask)
    if padded.ids is None:
        shape = (known.shape[0], new_token_bucket)
        return host.full(shape, pad, host.int32), host.zeros(shape, bool), last_column
    extra = ((0, 0), (0, new_token_bucket))
    sequences = host.pad(host.asarray(padded.ids), extra, constant_values=pad)
    return sequences, host.pad(known, extra), last_column


def cache_kind(config: GenerationConfig, *, ring: bool) -> CacheKind:
    """The kind of cache that `cache_implementation` and `cache_config` name.

    "static" and "dynamic" are the plain cache: it has its full size from the start, as "static" in
    transformers. "quantized" keeps 8 bits a number, and "sliding_window" attends to the newest
    tokens only.

    Args:
        ring: columns that have left a window are not needed any more, and so are overwritten.

    Raises:
        UnsupportedError: another number of bits, or a backend's own option.
        InputError: an option that is missing, impossible, or without effect.
    """
    name, options = config.cache_implementation, dict(config.cache_config or {})
    kind = PLAIN
    if name == "quantized":
        bits = options.pop("nbits", None)
        if bits != 8:
            raise UnsupportedError(
                f"cache_config: nbits={bits!r} is not supported; a quantized cache has 8 bits "
                'here, so say cache_config={"nbits": 8}'
            )
        if options:
            first = next(iter(options))
            raise UnsupportedError(
                f"cache_config: {first}={options[first]!r} is not supported; each head and slot "
                "has a scale of its own, and there are no backends, groups or residual lengths"
            )
        kind = CacheKind(quantized=True)
    elif name == "sliding_window":
        if "sliding_window" not in options:
            raise InputError(
                'cache_config: cache_implementation="sliding_window" needs {"sliding_window": W}, '
                "the number of tokens that are kept"
            )
        window = options.pop("sliding_window")
        leaf = int_leaf("cache_config", "sliding_window", window, least=1)
        kind = CacheKind(window=leaf, ring=ring)
    if options:
        raise InputError(
            f"cache_config: {next(iter(options))!r} has no effect with "
            f"cache_implementation={name!r}"
        )
    return kind


def cache_slots(config: GenerationConfig, kind: CacheKind, slots: int, needed: int) -> int:
    """Slots to allocate.

    Args:
        slots: slots that the call takes in its buckets.
        needed: slots that it takes without rounding up, at most.

    Raises:
        InputError: `max_cache_len` is too small.
    """
    limit = config.max_cache_len
    if kind.window is not None:
        if limit is not None:
            raise InputError("max_cache_len: a sliding window has a length of its own; drop it")
        return min(bucket(int(kind.window), SMALLEST_BUCKET), slots) if kind.ring else slots
    if limit is None:
        return slots
    if limit < needed:
        raise InputError(
            f"max_cache_len: {limit} slots, but this call needs {needed}; raise it, or lower "
            "max_new_tokens"
        )
    return max(slots, limit)
