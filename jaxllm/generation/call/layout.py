"""Pads the arrays of a call to buckets for the compiled programs, and sizes its cache.

Rounding up prompt columns, new tokens and slots only changes the amount of padding, never the
result. The encoder's columns are padded where they are checked (`request.py`); `prepare.py` checks
the other arguments and calls this module last.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, UInt32

from jaxllm.cache.variants import PLAIN, CacheKind
from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.generation.call.past_key_values import PastKeyValues, continuation
from jaxllm.generation.inputs.arguments import (
    SMALLEST_BUCKET,
    PaddedBatch,
    last_token_columns,
    pad_right,
)
from jaxllm.generation.inputs.values import HostArray, any_traced, bucket, int_leaf
from jaxllm.generation.request import Request
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.resolve import MAX_COLUMNS
from jaxllm.generation.strategies.guidance import NegativePrompt
from jaxllm.generation.strategies.strategy import AnyStrategy, PrefillInputs


def build_layout(
    request: Request,
    padded: PaddedBatch,
    strategy: AnyStrategy,
    keys: Key[Array, " Bn"] | UInt32[Array, "Bn 3"],
    past: PastKeyValues | None,
) -> tuple[PrefillInputs, int, int | None]:
    """Pads the arrays of a call to buckets and sizes its cache.

    Args:
        padded: the prompts, padded to their bucket.
        keys: random keys, one for each sample of each row.
        past: the cache of an earlier call, which holds the beginning of the prompt.

    Returns:
        The arrays, the number of cache slots, and the columns of a chunk of the prompt; None: the
        prompt is run at once.

    Raises:
        InputError: too many beams for a cache, or a prompt that does not continue `past`.
    """
    config, return_cache = request.config, request.arguments.return_past_key_values
    chunk_size = prefill_chunk_size(request, strategy)
    new_token_bucket = request.new_token_bucket
    new_slots = strategy.cache_slots(new_token_bucket)
    capacity = request.width + new_slots
    if capacity > MAX_COLUMNS:
        raise InputError(
            f"num_beams: {config.num_beams} beams of {new_token_bucket} new tokens need {capacity} "
            f"slots of the cache, which has at most {MAX_COLUMNS}: lower one of the two"
        )
    # A ring buffer overwrites columns that have left the window; a later call and
    # output_attentions need them, and the latter the number of slots too.
    own_cache = strategy.allows_ring_cache and not return_cache and not config.output_attentions
    if past is None:
        # It takes a whole prompt or single columns.
        kind = cache_kind(config, ring=own_cache and chunk_size is None)
        if return_cache:
            capacity = bucket(capacity, SMALLEST_BUCKET)  # the size that the next call will have
        arrays = prefill_inputs(request, padded, keys, kind)
    else:
        _refuse_cache_settings(config)
        new = continuation(past, request)
        capacity = new.capacity(new_slots, past.cache.capacity)
        kind = CacheKind.like(past.cache)
        arrays = dataclasses.replace(
            prefill_inputs(request, padded, keys, kind),
            decoder_inputs=new.decoder_inputs,
            cache_len=new.cache_len,
            last_column=new.last_column,
            # After a first call the cache has one length for all rows, after a later call one per
            # row. `compact` sets it again; one shape for both here lets one program serve both.
            past_cache=past.cache.replace(length=past.cache.next_position),
        )
    needed = int(np.max(arrays.cache_len)) + strategy.cache_slots(request.max_new_tokens)
    if past is None and own_cache:
        # With the prompt's bucket, so that its exact length does not choose the program.
        with_bucket = request.width + strategy.cache_slots(request.max_new_tokens)
        capacity = tiled_slots(capacity, with_bucket, request.model.cache_slot_tile, new_slots)
    capacity = cache_capacity(config, kind, capacity, needed)
    capacity += -capacity % request.model.cache_slot_multiple
    return arrays, capacity, chunk_size


def prefill_chunk_size(request: Request, strategy: AnyStrategy) -> int | None:
    """The call's `prefill_chunk_size`; None where it does not apply and a file has set it.

    Raises:
        UnsupportedError: the call sets it, and the prompt cannot be run in chunks.
    """
    config = request.config
    if config.prefill_chunk_size is None:
        return None
    rope = getattr(request.model.config, "rotary", None)
    reasons = {
        "an encoder-decoder, whose prompt is the encoder's": request.model.is_encoder_decoder,
        "a negative prompt": request.negative is not None,
        "output_hidden_states and output_attentions": config.output_hidden_states
        or config.output_attentions,
        "DoLa": bool(strategy.extra_decode_options),
        "a quantized cache, which a whole prompt does not read": config.cache_implementation
        == "quantized",
        "RoPE that depends on the length of the prompt": rope is not None and rope.uses_length,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is None:
        return config.prefill_chunk_size
    if "prefill_chunk_size" in config.explicit:
        raise UnsupportedError(
            f"prefill_chunk_size cannot be combined with {reason}; remove one of them"
        )
    return None


def prefill_inputs(
    request: Request,
    padded: PaddedBatch,
    keys: Key[Array, " Bn"] | UInt32[Array, "Bn 3"],
    kind: CacheKind,
) -> PrefillInputs:
    """The padded arrays of a call that starts with an empty cache."""
    sequences, mask, last_column = sequence_buffers(padded, request.new_token_bucket, request.pad)
    negative = request.negative
    if negative is not None:
        negative = NegativePrompt.of(negative.pad_to(request.width, request.pad))
    return PrefillInputs(
        decoder_inputs=request.decoder_inputs(padded),
        encoder_inputs=request.encoder_arguments,
        sequences=sequences,
        mask=mask,
        start_len=np.int32(request.start_len),  # pyright: ignore[reportArgumentType]
        cache_len=np.int32(request.columns),  # pyright: ignore[reportArgumentType]
        last_column=last_column,
        keys=keys,
        cache_kind=kind,
        negative=negative,
    )


def _refuse_cache_settings(config: GenerationConfig) -> None:
    """Raises InputError if the call sets a cache kind, since `past_key_values` has one already. A
    kind from the model's own generation config was applied by the first call."""
    for option in ("cache_implementation", "cache_config"):
        if option in config.explicit and getattr(config, option) is not None:
            raise InputError(f"{option}: past_key_values has a kind already; give one of the two")


def sequence_buffers(
    padded: PaddedBatch, new_token_bucket: int, pad: int
) -> tuple[HostArray, HostArray, HostArray]:
    """Buffers for prompt and new tokens, and the last real column of each row's prompt.

    Built with numpy unless the prompt is traced, so that other lengths compile nothing.

    Returns:
        `sequences` int32 [B, L], `mask` bool [B, L] and the columns int32 [B]. L is the width of
        the prompt's ids (0 for embeddings alone) plus `new_token_bucket`.
    """
    host = jnp if any_traced(padded) else np
    prompt_mask, last_column = host.asarray(padded.mask), last_token_columns(padded.mask)
    if padded.ids is None:
        shape = (prompt_mask.shape[0], new_token_bucket)
        return host.full(shape, pad, host.int32), host.zeros(shape, bool), last_column
    sequences = pad_right(host.asarray(padded.ids), new_token_bucket, pad)
    return sequences, pad_right(prompt_mask, new_token_bucket, False), last_column


def cache_kind(config: GenerationConfig, *, ring: bool) -> CacheKind:
    """`required_cache_kind`; the plain cache where a file asks for what is not possible, since a
    file says how to compute, not what."""
    try:
        return required_cache_kind(config, ring=ring)
    except (InputError, UnsupportedError):
        if not config.explicit.isdisjoint(("cache_implementation", "cache_config")):
            raise
        return PLAIN


def required_cache_kind(config: GenerationConfig, *, ring: bool) -> CacheKind:
    """Cache kind from `cache_implementation` and `cache_config`.

    "static" and "dynamic" are the plain cache: it has its full size from the start, as "static" in
    transformers. "quantized" stores keys and values in 8 bits, and "sliding_window" attends to
    the newest tokens only.

    Args:
        ring: store a sliding window as a ring buffer, which overwrites columns that have left it.

    Raises:
        UnsupportedError: a number of bits other than 8, or another option of a quantized cache.
        InputError: an option is missing, invalid or without effect.
    """
    name, options = config.cache_implementation, dict(config.cache_config or {})
    kind = PLAIN
    if name == "quantized":
        bits = options.pop("nbits", None)
        if bits != 8:
            raise UnsupportedError(
                f"cache_config: nbits={quoted(bits)} is not supported; use "
                'cache_config={"nbits": 8}'
            )
        if options:
            name, value = next(iter(options.items()))
            raise UnsupportedError(
                f"cache_config: {name}={quoted(value)} is not supported; each head and slot "
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


def tiled_slots(slots: int, needed: int, tile: int, new_slots: int) -> int:
    """Number of cache slots, of which the device lays out multiples of `tile`.

    Rounding up to buckets and then to tiles may allocate, and read at every step, tiles that the
    call does not need.

    Args:
        slots: slots with rounding up to buckets.
        needed: slots without rounding up the new tokens.
        new_slots: those of the new tokens, rounded up. There are at most three results for each
            bucket of them, so that not every number of tokens has a program of its own.

    >>> tiled_slots(544, needed=512, tile=128, new_slots=512)
    512
    >>> tiled_slots(544, needed=520, tile=128, new_slots=512)
    544
    >>> tiled_slots(544, needed=512, tile=1, new_slots=512)
    544
    """
    if tile == 1:
        return slots
    step = max(tile, new_slots // 4)
    return min(slots, -(-needed // step) * step)


def cache_capacity(config: GenerationConfig, kind: CacheKind, slots: int, needed: int) -> int:
    """Number of cache slots to allocate.

    Args:
        slots: slots needed with rounding up to buckets.
        needed: most slots needed without rounding up.

    Raises:
        InputError: `max_cache_len` is too small, or given with a sliding window.
    """
    limit = config.max_cache_len
    if kind.window is not None:
        if limit is not None:
            raise InputError("max_cache_len has no effect on a sliding window; remove it")
        return min(bucket(int(kind.window), SMALLEST_BUCKET), slots) if kind.ring else slots
    if limit is None:
        return slots
    if limit < needed:
        raise InputError(
            f"max_cache_len: {limit} slots, but this call needs {needed}; raise it, or lower "
            "max_new_tokens"
        )
    if limit > MAX_COLUMNS:
        raise InputError(f"max_cache_len: {limit} slots, and a cache has at most {MAX_COLUMNS}")
    return max(slots, limit)
