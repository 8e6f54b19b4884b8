"""The host's side of a call: arguments are checked and brought into buckets, once.

Whatever is rounded up here (prompt columns, encoder columns, new tokens) only changes how much
padding the compiled program sees, never its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import InputError
from jaxllm.generation.config import (
    GenerationConfig,
    check_consistent,
    check_supported,
    resolve_eos,
    resolve_lengths,
    resolve_pad,
)
from jaxllm.generation.keys import row_keys
from jaxllm.generation.processors.build import build_processors
from jaxllm.generation.prompts import (
    SMALLEST_BUCKET,
    Columns,
    check_room,
    decoder_only_prompt,
    decoder_prompt,
    encoder_side,
    pad_right,
)
from jaxllm.generation.state import Settings
from jaxllm.generation.values import bucket, id_table, is_traced
from jaxllm.models import inputs as check

# Settings that shape the program or the host's checks; all other numbers may be tracers.
STATIC = (
    *("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    *("bad_words_ids", "sequence_bias", "num_return_sequences", "do_sample"),
)
MOST_COLUMNS = 2**20


@dataclasses.dataclass(frozen=True)
class Request:
    """One call, ready for the compiled programs; all arrays have bucket sizes."""

    prompt: Mapping[str, Any]
    encoder: Mapping[str, Any]
    sequences: Any
    mask: Any
    start_len: int
    """Columns of `sequences` that the prompt fills."""
    columns: int
    """Columns of the prompt in the cache (more than `start_len` with embeddings alone)."""
    at: Any
    keys: Any
    settings: Settings
    until: int
    """`max_length`: columns of the longest result."""
    capacity: int
    room: int
    """Bucket of the number of new tokens."""
    traced: bool


def merged_config(
    model: Any, generation_config: Any, fields: Mapping[str, Any]
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
        if any(is_traced(x) for x in jax.tree.leaves(explicit.to_dict().get(name))):
            raise InputError(f"{name}: must be known outside jax.jit; found a tracer")
    own = getattr(model, "generation_config", None) or GenerationConfig()
    config = own.merge(explicit)
    check_supported(config)
    check_consistent(config)
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
    *,
    row_ids: Any = None,
    inputs_embeds: Any = None,
    token_type_ids: Any = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Any = None,
    encoder_outputs: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    logits_processor: Any = (),
) -> Request:
    """Checks everything that can be checked before jit, and lays the call out in buckets."""
    config, eos = merged_config(model, generation_config, fields)
    if encoder_attention_mask is not None and encoder_hidden_states is None:
        raise InputError("encoder_attention_mask: given without encoder_hidden_states")
    pad = resolve_pad(config, eos)
    pad = model.config.pad_token_id if pad is None else pad
    vocabulary = model.config.vocab_size
    if pad is not None and not 0 <= pad < vocabulary:
        raise InputError(f"pad_token_id: {pad} is not in the vocabulary (0 to {vocabulary - 1})")
    encoder: dict[str, Any] = {}
    source: Columns | None = None
    if model.is_encoder_decoder:
        for name, value in (
            ("token_type_ids", token_type_ids),
            ("encoder_hidden_states", encoder_hidden_states),
            ("encoder_attention_mask", encoder_attention_mask),
        ):
            if value is not None:
                raise InputError(f"{name}: not an input of an encoder-decoder")
        source, encoder = encoder_side(
            model, input_ids, attention_mask, inputs_embeds, encoder_outputs
        )
        batch = source.mask.shape[0]
        given = decoder_prompt(model, decoder_input_ids, decoder_attention_mask, batch, config)
    else:
        for name, value in (
            ("decoder_input_ids", decoder_input_ids),
            ("decoder_attention_mask", decoder_attention_mask),
            ("encoder_outputs", encoder_outputs),
        ):
            if value is not None:
                raise InputError(f"{name}: this model has a decoder only")
        given = decoder_only_prompt(
            model, input_ids, attention_mask, inputs_embeds, config, eos, pad
        )
        if encoder_hidden_states is not None:
            states = jnp.asarray(encoder_hidden_states)
            if states.shape[0] != given.mask.shape[0]:
                raise InputError(
                    f"encoder_hidden_states: {states.shape[0]} rows for "
                    f"{given.mask.shape[0]} prompts"
                )
            encoder["encoder_hidden_states"] = states
            encoder["encoder_attention_mask"] = check.mask_of(
                "encoder_attention_mask", encoder_attention_mask, states.shape[:2]
            )
    start_len = 0 if given.ids is None else given.length
    lengths = resolve_lengths(config, start_len, model.config.context_length)
    until = whole("max_length", lengths.max_length)
    if given.ids is None and "max_length" in config.to_dict() and config.max_new_tokens is None:
        until -= given.length  # max_length counts the embedded prompt, which is not returned
        if until < 1:
            raise InputError("inputs_embeds: the prompt alone reaches max_length")
    if given.ids is None and config.min_length:  # and so does min_length
        config = config.replace(min_length=max(config.min_length - given.length, 0))
    new = until - start_len
    if until > MOST_COLUMNS:
        raise InputError(
            f"max_length: {until} columns; the cache is allocated for all of them, at most "
            f"{MOST_COLUMNS}: lower max_new_tokens or max_length"
        )
    check_room(model, given, new)
    room = bucket(new, SMALLEST_BUCKET)
    # A lone start token, T5's usual prompt, needs no padding.
    width = 1 if given.length == 1 else bucket(given.length, SMALLEST_BUCKET)
    padded = given.pad_to(width, pad or 0)
    length = (0 if given.ids is None else padded.length) + room
    batch = given.mask.shape[0]
    host = np if not _any_traced(given) else jnp
    sequences = host.full((batch, length), 0 if pad is None else pad, host.int32)
    mask = host.zeros((batch, length), bool)
    if given.ids is not None:
        rest = ((0, 0), (0, length - padded.length))
        sequences = host.pad(
            host.asarray(padded.ids), rest, constant_values=0 if pad is None else pad
        )
        mask = host.pad(host.asarray(padded.mask), rest)
    columns = host.arange(padded.length)
    at = host.max(host.where(host.asarray(padded.mask), columns, 0), axis=-1).astype(host.int32)
    prompt: dict[str, Any] = {"tokens": padded.ids, "mask": padded.mask}
    if padded.embeds is not None:
        prompt["inputs_embeds"] = padded.embeds
    if token_type_ids is not None:
        types = check.token_ids("token_type_ids", token_type_ids, vocabulary)
        if types.shape != given.mask.shape:
            raise InputError(f"token_type_ids: expected {given.mask.shape}, found {types.shape}")
        prompt["token_type_ids"] = pad_right(
            types if is_traced(types) else np.asarray(types), padded.length - given.length, 0
        )
    settings = Settings(
        processors=build_processors(
            config,
            prompt_len=start_len,
            max_length=until,
            eos_token_id=eos,
            vocab_size=vocabulary,
            encoder_input_ids=None if source is None else source.ids,
            encoder_mask=None if source is None else source.mask,
            prompt_ids=padded.ids,
            prompt_mask=padded.mask,
            extra=processor_list(logits_processor),
        ),
        eos=id_table("generate()", "eos_token_id", list(eos)),
        pad=jnp.asarray(0 if pad is None else pad, jnp.int32),
        sampling=bool(config.do_sample),
        allow_nonfinite=bool(config.remove_invalid_values),
        keep_scores=bool(config.output_scores),
        keep_logits=bool(config.output_logits),
    )
    traced = _any_traced(given, source, settings, jax.tree.leaves(model)[0])
    keys = row_keys(
        key,
        row_ids,
        batch,
        config.num_return_sequences,
        sampling=settings.sampling,
        under_jit=traced,
    )
    return Request(
        prompt=prompt,
        encoder=encoder,
        sequences=sequences,
        mask=mask,
        start_len=start_len,
        columns=given.length,
        at=at,
        keys=keys,
        settings=settings,
        until=until,
        capacity=padded.length + room,
        room=room,
        traced=traced or _any_traced(keys),
    )


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


def _any_traced(*values: Any) -> bool:
    leaves = jax.tree.leaves(
        [dataclasses.asdict(v) if isinstance(v, Columns) else v for v in values]
    )
    return any(is_traced(x) for x in leaves)
