"""Prepares a call of `generate` on the host: checks its arguments, pads it to buckets, and refuses
what cannot fit the memory before anything is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.common.hardware import default_device, format_bytes, nbytes, total_memory
from jaxllm.generation.call.layout import build_layout
from jaxllm.generation.call.past_key_values import PastKeyValues, checked_past, continued_inputs
from jaxllm.generation.inputs.arguments import (
    CallArguments,
    PaddedBatch,
    TokenRows,
    check_positions,
    checked_types,
    processor_list,
    split_keywords,
)
from jaxllm.generation.inputs.values import any_traced, id_table
from jaxllm.generation.processors.build import ProcessorInputs, build_processors
from jaxllm.generation.registration import check_assistant_inputs, select_strategy
from jaxllm.generation.request import (
    Request,
    decoder_only_inputs,
    seq2seq_inputs,
    transformed_inputs,
)
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.resolve import checked_lengths, checked_pad, merged_config
from jaxllm.generation.stopping import MaxTimeCriteria, build_criteria
from jaxllm.generation.strategies.draws import RandomKey, row_keys, shared_key
from jaxllm.generation.strategies.guidance import negative_prompt
from jaxllm.generation.strategies.strategy import AnyStrategy, DecodeSettings, PrefillInputs
from jaxllm.models.decoder import FlatModel, GenerativeModel, checked_generative
from jaxllm.models.decoder_only import with_rope_length
from jaxllm.parallel.placement import mesh_of, put_everywhere, put_rows

MAX_SEQUENCES = 2**20
"""Most sequences of a call, results of all rows or beams of all rows."""
CHECKED_SLOTS = 2**14
CHECKED_LOGITS = 2**24
"""Sizes, in cache slots and logits of all sequences, above which the memory of a call is predicted
before it runs. Smaller ones fit wherever the model does, and are not delayed."""


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """A request as arguments of the compiled programs, and the sizes of its buffers."""

    request: Request
    model: FlatModel
    strategy: AnyStrategy
    inputs: PrefillInputs
    """The prompts, padded to buckets."""
    settings: DecodeSettings
    capacity: int
    """Number of cache slots."""
    chunk_size: int | None
    """Columns of a chunk of the prompt (`prefill_chunk_size`); None: the prompt is run at once."""
    time_limits: tuple[MaxTimeCriteria, ...]
    """Checked on the host after each token."""
    traced: bool
    """The call is being traced by the caller's jit."""
    mesh: Mesh | None = None
    """Mesh of the model, if it is on several devices."""

    def on_mesh(self, mesh: Mesh) -> PreparedCall:
        """The call with its arrays on the mesh: rows are sharded, settings replicated.

        Raises:
            UnsupportedError: max_time with several processes, whose clocks could disagree.
        """
        if mesh.is_multi_process and self.time_limits:
            raise UnsupportedError(
                "max_time: the clocks of several processes differ; limit max_new_tokens instead"
            )
        cache_kind = put_everywhere(self.inputs.cache_kind, mesh)
        return dataclasses.replace(
            self,
            mesh=mesh,
            inputs=put_rows(dataclasses.replace(self.inputs, cache_kind=cache_kind), mesh),
            settings=put_everywhere(self.settings, mesh),
            strategy=put_everywhere(self.strategy, mesh),
        )


# However a caller guards: settings become arrays, and the mask is read on the host.
@jax.transfer_guard_host_to_device("allow")
@jax.transfer_guard_device_to_host("allow")
def prepare_call(
    model: GenerativeModel,
    input_ids: TokenRows | None,
    attention_mask: TokenRows | None,
    generation_config: GenerationConfig | Mapping[str, Any] | None,
    key: RandomKey,
    keywords: Mapping[str, Any],
) -> PreparedCall:
    """Checks everything that can be checked before jit, and pads the call to buckets.

    Args:
        keywords: the other keyword arguments of `generate`.

    Raises:
        InputError, UnsupportedError: as `generate`.
    """
    model = checked_generative(model, "generate")
    arguments, fields = split_keywords(
        {**keywords, "input_ids": input_ids, "attention_mask": attention_mask}
    )
    assistant = with_rope_length(arguments.assistant_model, arguments.rope_length)
    arguments = dataclasses.replace(arguments, assistant_model=assistant)
    config, eos = merged_config(model, generation_config, fields, assistant)
    past = checked_past(arguments.past_key_values)
    request = checked_request(model, config, eos, arguments, past)
    padded = request.padded_prompt()
    settings, time_limits = decode_settings(request, padded)
    strategy = select_strategy(request)
    if request.negative is not None:
        check_positions(model, request.negative, request.max_new_tokens)
    check_assistant_inputs(request)
    check_past_support(request, strategy, past)
    flat = FlatModel.of(with_rope_length(model, arguments.rope_length))
    leaves = (request.prompt, request.negative, request.encoder_input, settings, strategy, key)
    traced, mesh = any_traced(*leaves, flat.leaves[0]), mesh_of(flat)
    keys = row_keys(
        shared_key(key, mesh),
        arguments.row_ids,
        request.batch,
        strategy.keys_per_row,
        sampling=strategy.draws,
        under_jit=traced,
    )
    inputs, capacity, chunk_size = build_layout(request, padded, strategy, keys, past)
    call = PreparedCall(
        request=request,
        model=flat,
        strategy=strategy,
        inputs=inputs,
        settings=settings,
        capacity=capacity,
        chunk_size=chunk_size,
        time_limits=time_limits,
        traced=traced or any_traced(keys),
    )
    return call if mesh is None or call.traced else call.on_mesh(mesh)


def checked_request(
    model: GenerativeModel,
    config: GenerationConfig,
    eos: tuple[int, ...],
    arguments: CallArguments,
    past: PastKeyValues | None,
) -> Request:
    """Checks the inputs of the model, the lengths, and the unconditional contexts of guidance."""
    pad = checked_pad(model, config, eos)
    given = transformed_inputs(model, config, arguments)
    if past is not None:
        inputs = continued_inputs(past, model, given, config, eos, pad)
    elif model.is_encoder_decoder:
        inputs = seq2seq_inputs(model, given, config)
    else:
        inputs = decoder_only_inputs(model, given, config, eos, pad)
    prompt, encoder_input, encoder_arguments = inputs
    negative = negative_prompt(model, config, given, prompt)
    types = checked_types(model, given.token_type_ids, prompt)
    config, max_length = checked_lengths(model, config, prompt)
    check_sequences(config, prompt.rows)
    return Request(
        model=model,
        config=config,
        eos=eos,
        prompt=prompt,
        max_length=max_length,
        arguments=arguments,
        encoder_input=encoder_input,
        encoder_arguments=encoder_arguments,
        negative=negative,
        token_type_ids=types,
        pad=pad or 0,
    )


def check_sequences(config: GenerationConfig, rows: int) -> None:
    """Raises InputError if a call asks for more than `MAX_SEQUENCES` results or beams."""
    for name in ("num_return_sequences", "num_beams"):
        count = getattr(config, name)
        if rows * count > MAX_SEQUENCES:
            raise InputError(
                f"{name}: {count} for each of {rows} prompts is {rows * count} sequences, and one "
                f"call decodes at most {MAX_SEQUENCES}: lower it, or call several times with "
                "other seeds"
            )


def check_past_support(request: Request, strategy: AnyStrategy, past: PastKeyValues | None) -> None:
    """Raises UnsupportedError for a strategy that cannot continue from a cache, or a prompt that a
    later call could not continue."""
    if past is not None and not strategy.can_continue:
        raise UnsupportedError(
            "past_key_values: contrastive search compares hidden states of the whole sequence, "
            "which a cache does not hold (transformers fails there, too)"
        )
    if request.arguments.return_past_key_values and request.prompt.ids is None:
        raise UnsupportedError(
            "return_past_key_values: a prompt of inputs_embeds has no tokens that a later call "
            "could be compared with"
        )


def decode_settings(
    request: Request, padded: PaddedBatch
) -> tuple[DecodeSettings, tuple[MaxTimeCriteria, ...]]:
    """The settings that every strategy reads, and the time limits that the host checks.

    Args:
        padded: the prompts of the request, padded to their bucket.
    """
    config = request.config
    # The decoder's prompt does not stand in for an encoder's input without ids.
    encoder_input = padded if request.encoder_input is None else request.encoder_input
    inputs = ProcessorInputs(
        config,
        prompt_len=request.start_len,
        max_length=request.max_length,
        eos=request.eos,
        vocab_size=request.model.config.vocab_size,
        encoder_ids=encoder_input.ids,
        encoder_mask=encoder_input.mask,
    )
    stops, time_limits = build_criteria(config, request.arguments)
    settings = DecodeSettings(
        processors=build_processors(
            inputs,
            prefix_allowed_tokens_fn=request.arguments.prefix_allowed_tokens_fn,
            extra=processor_list(request.arguments.logits_processor),
        ),
        eos=id_table("generate()", "eos_token_id", list(request.eos)),
        pad=np.int32(request.pad),  # pyright: ignore[reportArgumentType]
        max_length=np.int32(request.max_length),  # pyright: ignore[reportArgumentType]
        stops=stops,
        allow_nonfinite=bool(config.remove_invalid_values),
        is_guided=request.negative is not None,
        keep_scores=bool(config.output_scores),
        keep_logits=bool(config.output_logits),
        keep_hidden_states=bool(config.output_hidden_states),
        keep_attentions=bool(config.output_attentions),
    )
    return settings, time_limits


def is_large(call: PreparedCall) -> bool:
    """True if the memory of a call is to be predicted."""
    sequences, vocab_size = call.inputs.keys.shape[0], call.request.model.config.vocab_size
    return sequences * call.capacity > CHECKED_SLOTS or sequences * vocab_size > CHECKED_LOGITS


def check_memory(call: PreparedCall, state: object) -> None:
    """Raises InputError if weights and decoding state need more memory than the devices have.

    Not for a model without weights: it is planned for other devices than this machine's.

    Args:
        state: shapes of the decoding state.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in call.model.leaves):
        return
    devices = [default_device()] if call.mesh is None else call.mesh.local_devices
    needed, memory = nbytes(call.model) + nbytes(state), total_memory(devices) * jax.process_count()
    if needed > memory:
        sequences, slots = call.inputs.keys.shape[0], call.capacity
        raise InputError(
            f"a KV cache of {slots} slots (for each of {sequences} sequences) and the weights need "
            f"{format_bytes(needed)}, but there are {format_bytes(memory)} of memory: lower "
            "num_return_sequences, num_beams, max_new_tokens, max_cache_len or the number of "
            "prompts"
        )
