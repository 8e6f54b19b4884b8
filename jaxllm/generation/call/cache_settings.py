"""From the settings of a cache (`cache_implementation` and its company) to its kind and size."""

from __future__ import annotations

from jaxllm.cache.variants import PLAIN, CacheKind
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket, int_leaf
from jaxllm.generation.settings.config import GenerationConfig


def cache_kind(config: GenerationConfig, *, ring: bool) -> CacheKind:
    """The kind that `cache_implementation` and `cache_config` name.

    "static" and "dynamic" are the plain cache: it has its full size from the start, as "static" in
    transformers. "quantized" keeps 8 bits a number, and "sliding_window" shows the newest tokens.

    Args:
        ring: nobody asks for what has left a window, so it need not be kept.

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
                "the number of tokens that are kept; the configs of T5, Llama and GPT-2 name none"
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
        slots: what the call takes in its buckets.
        needed: what it takes without them, at most.

    Raises:
        InputError: `max_cache_len` is too little.
    """
    most = config.max_cache_len
    if kind.window is not None:
        if most is not None:
            raise InputError("max_cache_len: a sliding window has a length of its own; drop it")
        return min(bucket(int(kind.window), SMALLEST_BUCKET), slots) if kind.ring else slots
    if most is None:
        return slots
    if most < needed:
        raise InputError(
            f"max_cache_len: {most} slots, but this call needs {needed}; raise it, or lower "
            "max_new_tokens"
        )
    return max(slots, most)
