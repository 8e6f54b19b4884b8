"""The host's side of a call: arguments are checked and brought into buckets, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.generation.call.keys import row_keys
from jaxllm.generation.call.layout import PreparedInputs, lay_out
from jaxllm.generation.call.merging import merged_config
from jaxllm.generation.call.past_key_values import PastKeyValues, checked_past, continued_sides
from jaxllm.generation.call.prompts import (
    decoder_only_sides,
    seq2seq_sides,
    transformed_prompt,
)
from jaxllm.generation.inputs.arguments import processor_list, refuse
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET, check_room, checked_types
from jaxllm.generation.inputs.values import any_traced, bucket, id_table
from jaxllm.generation.processors.build import build_processors
from jaxllm.generation.settings.lengths import checked_lengths
from jaxllm.generation.settings.special_tokens import checked_pad
from jaxllm.generation.stopping import MaxTimeCriteria
from jaxllm.generation.stopping.build import build_criteria
from jaxllm.generation.strategies.assisted.assistants import check_texts
from jaxllm.generation.strategies.demands import check_strategy
from jaxllm.generation.strategies.guidance import Negative, negative_prompt
from jaxllm.generation.strategies.select_strategy import Call, choose_strategy
from jaxllm.generation.strategies.strategy import DecodeSettings, Prompt, Strategy


@dataclasses.dataclass(frozen=True)
class Request:
    """One call, ready for the compiled programs; all arrays have bucket sizes."""

    strategy: Strategy[Any]
    prompt: Prompt
    negative: Negative | None
    """The contexts that guidance leads away from."""
    settings: DecodeSettings
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
    prompt_columns: int
    """Columns of the decoder's prompt, tokens or embeddings, without padding to a bucket."""
    source_len: int | None = None
    """Columns of the encoder's input, of an encoder-decoder."""
    encoder_ids: Any = None
    """The encoder's input [B, E], where it was ids."""
    returns_past: bool = False
    """The cache is returned."""
    mesh: Mesh | None = None
    """Where the arrays are, if on several devices."""


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
    **inputs: Any,
) -> Request:
    """Checks everything that can be checked before jit, and lays the call out in buckets."""
    assistant = arguments.get("assistant_model")
    config, eos = merged_config(model, generation_config, fields, assistant)
    pad = checked_pad(model, config, eos)
    if model.is_encoder_decoder:
        refuse({"token_type_ids": token_type_ids}, "not an input of an encoder-decoder")
    fixed = {"token_type_ids": token_type_ids, "past_key_values": past_key_values, **inputs}
    tokenizer = arguments.get("tokenizer")
    input_ids, attention_mask = transformed_prompt(
        model, config, tokenizer, input_ids, attention_mask, fixed
    )

    past = checked_past(past_key_values)
    sides: Any = seq2seq_sides if model.is_encoder_decoder else decoder_only_sides
    sides = sides if past is None else partial(continued_sides, past)
    given, source, encoder = sides(
        model, input_ids, attention_mask, config=config, eos=eos, pad=pad, **inputs
    )
    config, until = checked_lengths(model, config, given)
    new = until - given.start_len
    others = {"token_type_ids": token_type_ids, **inputs}
    negative = negative_prompt(model, config, arguments, given, others)
    if negative is not None:
        check_room(model, negative, new)
    types = checked_types(model, token_type_ids, given)
    texts = PreparedInputs(given, source, encoder, negative, types, pad or 0)

    call = Call(model, config, eos, given.rows, given.start_len, until, arguments)
    settings, clocks = settings_of(call, texts, processor_list(logits_processor))
    strategy = choose_strategy(call)
    if assistant is not None:
        check_texts(assistant, model, given, others, new)
    returns = return_past_key_values
    check_strategy(strategy, given, past is not None, returns)
    traced = any_traced(given, negative, source, settings, strategy, jax.tree.leaves(model)[0])
    keys = row_keys(
        key,
        row_ids,
        given.rows,
        strategy.samples,
        sampling=bool(config.do_sample),
        under_jit=traced,
    )
    room = bucket(new, SMALLEST_BUCKET)
    prompt, capacity = lay_out(
        texts, strategy, config, keys, new=new, room=room, past=past, returns_past=returns
    )
    return Request(
        strategy=strategy,
        prompt=prompt,
        negative=None if negative is None else Negative.of(negative.pad_to(texts.width, texts.pad)),
        settings=settings,
        start_len=given.start_len,
        until=until,
        capacity=capacity,
        room=room,
        clocks=clocks,
        traced=traced or any_traced(keys),
        prompt_columns=given.length,
        source_len=None if source is None else source.unpadded,
        encoder_ids=None if source is None else source.ids,
        returns_past=returns,
    )


def settings_of(
    call: Call, texts: PreparedInputs, processors: tuple[Any, ...]
) -> tuple[DecodeSettings, tuple[MaxTimeCriteria, ...]]:
    """What all strategies read, and the clocks that the host looks at.

    Args:
        processors: the caller's own.
    """
    config, source, padded = call.config, texts.source, texts.padded()
    stops, clocks = build_criteria(config, call.arguments)
    settings = DecodeSettings(
        processors=build_processors(
            config,
            prompt_len=call.start_len,
            max_length=call.until,
            eos_token_id=call.eos,
            vocab_size=call.model.config.vocab_size,
            encoder_input_ids=None if source is None else source.ids,
            encoder_mask=None if source is None else source.mask,
            prompt_ids=padded.ids,
            prompt_mask=padded.mask,
            prefix_allowed_tokens_fn=call.arguments.get("prefix_allowed_tokens_fn"),
            extra=processors,
        ),
        eos=id_table("generate()", "eos_token_id", list(call.eos)),
        pad=jnp.asarray(texts.pad, jnp.int32),
        max_length=jnp.asarray(call.until, jnp.int32),
        stops=stops,
        allow_nonfinite=bool(config.remove_invalid_values),
        keep_scores=bool(config.output_scores),
        keep_logits=bool(config.output_logits),
        keep_hidden_states=bool(config.output_hidden_states),
        keep_attentions=bool(config.output_attentions),
    )
    return settings, clocks
