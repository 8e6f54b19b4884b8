"""The host's side of a call: arguments are checked and brought into buckets, once.

Whatever is rounded up here (prompt columns, encoder columns, new tokens) only changes how much
padding the compiled program sees, never its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import InputError
from jaxllm.generation.caches import cache_kind, cache_slots
from jaxllm.generation.config import (
    GenerationConfig,
    check_consistent,
    check_supported,
    resolve_eos,
    resolve_lengths,
    resolve_pad,
)
from jaxllm.generation.demands import check_strategy
from jaxllm.generation.guidance import Negative, negative_prompt
from jaxllm.generation.keys import row_keys
from jaxllm.generation.modes import Call, choose_strategy
from jaxllm.generation.past import checked_past, continuation, continued_sides
from jaxllm.generation.processors.build import build_processors
from jaxllm.generation.prompts import (
    SMALLEST_BUCKET,
    Columns,
    check_room,
    decoder_only_sides,
    last_real,
    pad_right,
    refuse,
    seq2seq_sides,
)
from jaxllm.generation.stopping import (
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from jaxllm.generation.strategy import Prompt, Settings, Strategy
from jaxllm.generation.values import any_traced, bucket, id_table, is_traced
from jaxllm.models import inputs as check

# Settings that shape the program or the host's checks; all other numbers may be tracers.
STATIC = (
    *("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("bad_words_ids", "sequence_bias", "num_return_sequences", "do_sample", "num_beams"),
    *("num_beam_groups", "dola_layers", "cache_config", "max_cache_len"),
    *("num_assistant_tokens", "prompt_lookup_num_tokens", "assistant_early_exit"),
)
MOST_COLUMNS = 2**20


@dataclasses.dataclass(frozen=True)
class Request:
    """One call, ready for the compiled programs; all arrays have bucket sizes."""

    strategy: Strategy[Any]
    prompt: Prompt
    negative: Negative | None
    """The contexts that guidance leads away from."""
    settings: Settings
    start_len: int
    """Columns of `sequences` that the prompt fills."""
    until: int
    """`max_length`: columns of the longest result."""
    capacity: int
    """Slots of the cache."""
    room: int
    """Bucket of the number of new tokens."""
    clocks: tuple[MaxTimeCriteria, ...]
    """What the host asks after each token."""
    traced: bool
    """The caller's own jit is tracing this call."""
    source_len: int | None = None
    """Columns of the encoder's input, of an encoder-decoder."""
    encoder_ids: Any = None
    """The encoder's input [B, E], where it was ids."""
    returns_past: bool = False
    """The cache is returned."""


def merged_config(
    model: Any, generation_config: Any, fields: Mapping[str, Any], assistant_model: Any = None
) -> tuple[GenerationConfig, tuple[int, ...]]:
    """Settings of this call and the end tokens in force.

    A field of the call wins over `generation_config`, and that over the model's own file. Where
    neither names `eos_token_id`, every end token that the model's files name counts.
    """
    if generation_config is None:
        generation_config = GenerationConfig()
    elif isinstance(generation_config, Mapping):
        generation_config = GenerationConfig(**generation_config)
    elif not isinstance(generation_config, GenerationConfig):
        raise InputError(
            f"generation_config: expected a GenerationConfig, found {type(generation_config)}"
        )
    explicit = generation_config.merge(GenerationConfig(**fields))
    for name in STATIC:
        if any_traced(explicit.to_dict().get(name)):
            raise InputError(f"{name}: must be known outside jax.jit; found a tracer")
    own = getattr(model, "generation_config", None) or GenerationConfig()
    config = own.merge(explicit)
    check_supported(config)
    check_consistent(config, assistant_model)
    if "eos_token_id" in explicit.to_dict():
        return config, resolve_eos(config)
    named = (*resolve_eos(own), *model.config.eos_token_ids, *getattr(model, "extra_eos", ()))
    return config, tuple(dict.fromkeys(i for i in named if i >= 0))


def prepare(
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    generation_config: Any,
    key: Any,
    fields: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    row_ids: Any = None,
    logits_processor: Any = (),
    token_type_ids: Any = None,
    past_key_values: PastKeyValues | None = None,
    return_past_key_values: bool = False,
    heal: Callable[..., tuple[Any, Any]],
    **inputs: Any,
) -> Request:
    """Checks everything that can be checked before jit, and lays the call out in buckets.

    `heal(model, tokenizer, input_ids, attention_mask)` mends prompts (`token_healing`).
    """
    assistant = arguments.get("assistant_model")
    config, eos = merged_config(model, generation_config, fields, assistant)
    pad = checked_pad(model, config, eos)
    if model.is_encoder_decoder:
        refuse({"token_type_ids": token_type_ids}, "not an input of an encoder-decoder")
    if config.token_healing:
        tokenizer = needed_tokenizer(arguments, "token_healing")
        fixed = {"token_type_ids": token_type_ids, "past_key_values": past_key_values, **inputs}
        refuse(fixed, "not together with token_healing, which changes the prompt")
        input_ids, attention_mask = heal(model, tokenizer, input_ids, attention_mask)
    past = checked_past(past_key_values)
    sides: Any = seq2seq_sides if model.is_encoder_decoder else decoder_only_sides
    if past is not None:
        sides = partial(continued_sides, past)
    given, source, encoder = sides(
        model, input_ids, attention_mask, config=config, eos=eos, pad=pad, **inputs
    )
    batch = given.mask.shape[0]
    start_len = 0 if given.ids is None else given.length
    config, until = checked_lengths(model, config, given)
    room = bucket(until - start_len, SMALLEST_BUCKET)
    others = {"token_type_ids": token_type_ids, **inputs}
    negative = negative_prompt(model, config, arguments, given, others)
    if negative is not None:
        check_room(model, negative, until - start_len)
    columns = given.length if negative is None else max(given.length, negative.length)
    # A lone start token, T5's usual prompt, needs no padding.
    width = 1 if columns == 1 else bucket(columns, SMALLEST_BUCKET)
    padded = given.pad_to(width, pad or 0)
    decoder_inputs: dict[str, Any] = {"tokens": padded.ids, "mask": padded.mask}
    if padded.embeds is not None:
        decoder_inputs["inputs_embeds"] = padded.embeds
    if token_type_ids is not None:
        decoder_inputs["token_type_ids"] = checked_types(model, token_type_ids, given, width)
    stops, clocks = stopping(config, arguments)
    settings = Settings(
        processors=build_processors(
            config,
            prompt_len=start_len,
            max_length=until,
            eos_token_id=eos,
            vocab_size=model.config.vocab_size,
            encoder_input_ids=None if source is None else source.ids,
            encoder_mask=None if source is None else source.mask,
            prompt_ids=padded.ids,
            prompt_mask=padded.mask,
            prefix_allowed_tokens_fn=arguments.get("prefix_allowed_tokens_fn"),
            extra=processor_list(logits_processor),
        ),
        eos=id_table("generate()", "eos_token_id", list(eos)),
        pad=jnp.asarray(0 if pad is None else pad, jnp.int32),
        max_length=jnp.asarray(until, jnp.int32),
        stops=stops,
        allow_nonfinite=bool(config.remove_invalid_values),
        keep_scores=bool(config.output_scores),
        keep_logits=bool(config.output_logits),
        keep_hidden_states=bool(config.output_hidden_states),
        keep_attentions=bool(config.output_attentions),
    )
    strategy = choose_strategy(Call(model, config, eos, batch, start_len, until, arguments))
    if assistant is not None:
        if type(assistant) is not type(model):
            only_ours = {k: v for k, v in others.items() if k.startswith(("token_t", "encoder_h"))}
            refuse(only_ours, "not together with an assistant_model of another kind")
        check_room(assistant, given, until - start_len, whose="assistant_model")
    returns_past = return_past_key_values
    check_strategy(strategy, config, given, past is not None, returns_past, negative is not None)
    traced = any_traced(given, negative, source, settings, strategy, jax.tree.leaves(model)[0])
    keys = row_keys(
        key,
        row_ids,
        batch,
        strategy.samples,
        sampling=bool(config.do_sample),
        under_jit=traced,
    )
    sequences, mask, at = buffers(padded, room, pad or 0)
    used: Any = np.int32(columns)
    capacity, cache = width + strategy.slots(room), None
    if capacity > MOST_COLUMNS:
        raise InputError(
            f"num_beams: {config.num_beams} beams of {room} new tokens need {capacity} slots of "
            f"the cache, which has at most {MOST_COLUMNS}: lower one of the two"
        )
    if past is not None:
        name = "decoder_input_ids" if model.is_encoder_decoder else "input_ids"
        more = continuation(past, given, pad or 0, token_type_ids, name)
        decoder_inputs, at, used = more.inputs, more.at, more.columns
        capacity = more.capacity(strategy.slots(room), past.cache.capacity)
        if config.cache_implementation is not None:
            raise InputError(
                "cache_implementation: past_key_values has a kind already; give one of the two"
            )
        # What a first call leaves has one length for all rows, what a later one does one for each.
        # `compact` sets it anew; here they are made alike, so that one program reads both.
        cache = past.cache.replace(length=past.cache.next_position)
    elif returns_past:
        capacity = bucket(capacity, SMALLEST_BUCKET)  # as the next call will have it
    kind = cache_kind(config)
    needed = int(np.max(used)) + strategy.slots(until - start_len)
    capacity = cache_slots(config, kind, capacity, needed)
    prompt = Prompt(
        inputs=decoder_inputs,
        encoder=encoder,
        sequences=sequences,
        mask=mask,
        start_len=np.int32(start_len),  # pyright: ignore[reportArgumentType]
        columns=used,
        at=at,
        keys=keys,
        kind=kind,
        past=cache,
    )
    return Request(
        strategy=strategy,
        prompt=prompt,
        negative=None if negative is None else guide(negative.pad_to(width, pad or 0)),
        settings=settings,
        start_len=start_len,
        until=until,
        capacity=capacity,
        room=room,
        clocks=clocks,
        traced=traced or any_traced(keys),
        source_len=None if source is None else source.unpadded,
        encoder_ids=None if source is None else source.ids,
        returns_past=returns_past,
    )


def stopping(
    config: GenerationConfig, arguments: Mapping[str, Any]
) -> tuple[StoppingCriteriaList, tuple[MaxTimeCriteria, ...]]:
    """The criteria of the compiled loop, and the clocks that only the host can read."""
    given = arguments.get("stopping_criteria")
    given = [] if given is None else given
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        raise InputError(f"stopping_criteria: expected a list of callables, found {given!r}")
    clocks = [c for c in given if isinstance(c, MaxTimeCriteria)]
    if config.max_time is not None:
        clocks.insert(0, MaxTimeCriteria(config.max_time))
    stops = [c for c in given if not isinstance(c, MaxTimeCriteria)]
    if config.stop_strings is not None:
        tokenizer = needed_tokenizer(arguments, "stop_strings")
        stops.insert(0, StopStringCriteria(tokenizer, list(config.stop_strings)))
    return StoppingCriteriaList(stops), tuple(clocks)


def needed_tokenizer(arguments: Mapping[str, Any], field: str) -> Any:
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None:
        raise InputError(f"{field}: needs tokenizer=, the tokenizer of this model")
    return tokenizer


def checked_pad(model: Any, config: GenerationConfig, eos: tuple[int, ...]) -> int | None:
    pad = resolve_pad(config, eos)
    pad = model.config.pad_token_id if pad is None else pad
    vocabulary = model.config.vocab_size
    if pad is not None and not 0 <= pad < vocabulary:
        raise InputError(f"pad_token_id: {pad} is not in the vocabulary (0 to {vocabulary - 1})")
    return pad


def checked_lengths(
    model: Any, config: GenerationConfig, given: Columns
) -> tuple[GenerationConfig, int]:
    """Columns of the longest result; and the settings, in which lengths count those columns."""
    start_len = 0 if given.ids is None else given.length
    lengths = resolve_lengths(config, start_len, model.config.context_length)
    until = whole("max_length", lengths.max_length)
    if given.ids is None and "max_length" in config.to_dict() and config.max_new_tokens is None:
        until -= given.length  # max_length counts the embedded prompt, which is not returned
        if until < 1:
            raise InputError("inputs_embeds: the prompt alone reaches max_length")
    least = config.min_length
    if given.ids is None and (is_traced(least) or least):  # and so does min_length
        rest = least - given.length
        config = config.replace(
            min_length=jnp.maximum(rest, 0) if is_traced(rest) else max(rest, 0)
        )
    if until > MOST_COLUMNS:
        raise InputError(
            f"max_length: {until} columns; the cache is allocated for all of them, at most "
            f"{MOST_COLUMNS}: lower max_new_tokens or max_length"
        )
    check_room(model, given, until - start_len)
    return config, until


def checked_types(model: Any, token_type_ids: Any, given: Columns, width: int) -> Any:
    types = check.token_ids("token_type_ids", token_type_ids, model.config.vocab_size)
    if types.shape != given.mask.shape:
        raise InputError(f"token_type_ids: expected {given.mask.shape}, found {types.shape}")
    return pad_right(types if is_traced(types) else np.asarray(types), width - given.length, 0)


def buffers(padded: Columns, room: int, pad: int) -> tuple[Any, Any, Any]:
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


def guide(negative: Columns) -> Negative:
    return Negative(negative.ids, negative.mask, last_real(negative.mask))


def processor_list(processors: Any) -> tuple[Any, ...]:
    """The caller's processors; transformers takes them as a list, and so do we."""
    if processors is None:
        return ()
    if not isinstance(processors, list | tuple):
        raise InputError(f"logits_processor: expected a list of callables, found {processors!r}")
    return tuple(processors)


def whole(name: str, value: Any) -> int:
    """Lengths size the buffers, so they are known on the host even under the caller's jit."""
    if is_traced(value):
        raise InputError(f"{name}: must be a Python int, since it sizes the result; found a tracer")
    return int(value)
