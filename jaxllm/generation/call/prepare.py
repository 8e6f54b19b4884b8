"""Prepares a call of `generate` on the host: checks its arguments and pads it to buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.common.errors import UnsupportedError
from jaxllm.generation.call.keys import RandomKey, row_keys, shared_key
from jaxllm.generation.call.layout import Layout, build_layout
from jaxllm.generation.call.memory import check_sequences
from jaxllm.generation.call.merging import merged_config
from jaxllm.generation.call.past_key_values import PastKeyValues, checked_past, continued_inputs
from jaxllm.generation.call.prompts import (
    PreparedInputs,
    decoder_only_inputs,
    seq2seq_inputs,
    transformed_inputs,
)
from jaxllm.generation.inputs.arguments import (
    CallArguments,
    ModelInputs,
    TokenRows,
    processor_list,
    split_keywords,
)
from jaxllm.generation.inputs.padded_batch import check_positions, checked_types
from jaxllm.generation.inputs.values import any_traced, id_table
from jaxllm.generation.processors.build import build_processors
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.resolve import checked_lengths, checked_pad
from jaxllm.generation.stopping import MaxTimeCriteria
from jaxllm.generation.stopping.criteria import build_criteria
from jaxllm.generation.strategies.guidance import NegativePrompt, negative_prompt
from jaxllm.generation.strategies.select_strategy import (
    Call,
    check_assistant_inputs,
    select_strategy,
)
from jaxllm.generation.strategies.strategy import (
    AnyStrategy,
    DecodeSettings,
    PrefillInputs,
)
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.models.decoder_only import with_rope_length
from jaxllm.parallel.placement import mesh_of, put_everywhere, put_rows


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked call: arguments of the compiled programs, and values used on the host."""

    strategy: AnyStrategy
    inputs: PreparedInputs
    """The inputs of the model, not padded to buckets."""
    layout: Layout
    """The inputs padded to buckets, and the sizes of the buffers."""
    negative: NegativePrompt | None
    """The unconditional contexts of classifier-free guidance."""
    settings: DecodeSettings
    max_length: int
    """Columns of the longest result, prompt included."""
    time_limits: tuple[MaxTimeCriteria, ...]
    """Checked on the host after each token."""
    traced: bool
    """The call is being traced by the caller's jit."""
    return_past_key_values: bool
    rope_length: str = "batch"
    """Sequence length that dynamic and longrope RoPE use: of the "batch" or of each "row"."""
    mesh: Mesh | None = None
    """Mesh of the model, if it is on several devices."""

    @property
    def prefill_inputs(self) -> PrefillInputs:
        return self.layout.prefill_inputs

    @property
    def start_len(self) -> int:
        """Columns of `sequences` that the prompt fills."""
        return self.inputs.prompt.start_len

    @property
    def encoder_len(self) -> int | None:
        """Columns of the encoder's input without padding to a bucket; None for decoder-only
        models."""
        encoder_input = self.inputs.encoder_input
        return None if encoder_input is None else encoder_input.unpadded

    def on_mesh(self, mesh: Mesh) -> Request:
        """The request with its arrays on the mesh: rows are sharded, settings replicated.

        Raises:
            UnsupportedError: max_time with several processes, whose clocks could disagree.
        """
        if mesh.is_multi_process and self.time_limits:
            raise UnsupportedError(
                "max_time: the clocks of several processes differ; limit max_new_tokens instead"
            )
        cache_kind = put_everywhere(self.prefill_inputs.cache_kind, mesh)
        arrays = dataclasses.replace(self.prefill_inputs, cache_kind=cache_kind)
        return dataclasses.replace(
            self,
            mesh=mesh,
            layout=dataclasses.replace(self.layout, prefill_inputs=put_rows(arrays, mesh)),
            negative=put_rows(self.negative, mesh),
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
) -> Request:
    """Checks everything that can be checked before jit, and pads the call to buckets.

    Args:
        keywords: the other keyword arguments of `generate`.

    Raises:
        InputError, UnsupportedError: as `generate`.
    """
    model = checked_generative(model, "generate")
    split = split_keywords({**keywords, "input_ids": input_ids, "attention_mask": attention_mask})
    arguments, mesh = split.arguments, mesh_of(model)
    assistant = with_rope_length(arguments.assistant_model, arguments.rope_length)
    arguments = dataclasses.replace(arguments, assistant_model=assistant)
    past = checked_past(arguments.past_key_values)
    config, eos = merged_config(model, generation_config, split.settings, arguments.assistant_model)
    inputs = checked_inputs(model, split.inputs, arguments, config, eos, past)
    prompt = inputs.prompt
    config, max_length = checked_lengths(model, config, prompt)
    check_sequences(config, prompt.rows)
    call = Call(model, config, eos, prompt.rows, prompt.start_len, max_length, arguments)
    settings, time_limits = decode_settings(call, inputs)
    strategy = select_strategy(call)
    check_lengths(call, inputs, split.inputs)
    check_past_support(strategy, inputs, past, arguments)
    leaves = (prompt, inputs.negative, inputs.encoder_input, settings, strategy)
    traced = any_traced(*leaves, jax.tree.leaves(model)[0])
    keys = row_keys(
        shared_key(key, mesh),
        arguments.row_ids,
        prompt.rows,
        strategy.keys_per_row,
        sampling=bool(config.do_sample),
        under_jit=traced,
    )
    request = Request(
        strategy=strategy,
        inputs=inputs,
        layout=build_layout(call, inputs, strategy, keys, past),
        negative=padded_negative_prompt(inputs),
        settings=settings,
        max_length=max_length,
        time_limits=time_limits,
        traced=traced or any_traced(keys),
        return_past_key_values=arguments.return_past_key_values,
        rope_length=arguments.rope_length,
    )
    return request if mesh is None or request.traced else request.on_mesh(mesh)


def checked_inputs(
    model: GenerativeModel,
    inputs: ModelInputs,
    arguments: CallArguments,
    config: GenerationConfig,
    eos: tuple[int, ...],
    past: PastKeyValues | None,
) -> PreparedInputs:
    """Checks the inputs of the model and the unconditional contexts of guidance."""
    pad = checked_pad(model, config, eos)
    inputs = transformed_inputs(model, config, inputs, arguments)
    if past is not None:
        prompt_inputs = continued_inputs(past, model, inputs, config, eos, pad)
    elif model.is_encoder_decoder:
        prompt_inputs = seq2seq_inputs(model, inputs, config)
    else:
        prompt_inputs = decoder_only_inputs(model, inputs, config, eos, pad)
    return dataclasses.replace(
        prompt_inputs,
        negative=negative_prompt(model, config, arguments, prompt_inputs.prompt, inputs),
        token_type_ids=checked_types(model, inputs.token_type_ids, prompt_inputs.prompt),
        pad=pad or 0,
    )


def check_lengths(call: Call, inputs: PreparedInputs, unchecked: ModelInputs) -> None:
    """Raises InputError if the unconditional contexts are too long for the model, or if the
    assistant model cannot take the prompt. `unchecked`: the caller's inputs."""
    if inputs.negative is not None:
        check_positions(call.model, inputs.negative, call.max_new_tokens)
    assistant = call.arguments.assistant_model
    if assistant is not None:
        check_assistant_inputs(assistant, call.model, inputs.prompt, unchecked, call.max_new_tokens)


def check_past_support(
    strategy: AnyStrategy,
    inputs: PreparedInputs,
    past: PastKeyValues | None,
    arguments: CallArguments,
) -> None:
    """Raises UnsupportedError for a strategy that cannot continue from a cache, or a prompt that a
    later call could not continue."""
    if past is not None and not strategy.can_continue:
        raise UnsupportedError(
            "past_key_values: contrastive search compares hidden states of the whole sequence, "
            "which a cache does not hold (transformers fails there, too)"
        )
    if arguments.return_past_key_values and inputs.prompt.ids is None:
        raise UnsupportedError(
            "return_past_key_values: a prompt of inputs_embeds has no tokens that a later call "
            "could be compared with"
        )


def padded_negative_prompt(inputs: PreparedInputs) -> NegativePrompt | None:
    """The unconditional contexts padded to the prompt's bucket; None without guidance."""
    if inputs.negative is None:
        return None
    return NegativePrompt.of(inputs.negative.pad_to(inputs.width, inputs.pad))


def decode_settings(
    call: Call, inputs: PreparedInputs
) -> tuple[DecodeSettings, tuple[MaxTimeCriteria, ...]]:
    """The settings that every strategy reads, and the time limits that the host checks."""
    config, encoder_input, padded = call.config, inputs.encoder_input, inputs.padded_prompt()
    stops, time_limits = build_criteria(config, call.arguments)
    settings = DecodeSettings(
        processors=build_processors(
            config,
            prompt_len=call.start_len,
            max_length=call.max_length,
            eos_token_id=call.eos,
            vocab_size=call.model.config.vocab_size,
            encoder_input_ids=None if encoder_input is None else encoder_input.ids,
            encoder_mask=None if encoder_input is None else encoder_input.mask,
            # The decoder's prompt does not stand in for an encoder's input without ids.
            prompt_ids=None if call.model.is_encoder_decoder else padded.ids,
            prompt_mask=padded.mask,
            prefix_allowed_tokens_fn=call.arguments.prefix_allowed_tokens_fn,
            extra=processor_list(call.arguments.logits_processor),
        ),
        eos=id_table("generate()", "eos_token_id", list(call.eos)),
        pad=jnp.asarray(np.int32(inputs.pad)),
        max_length=jnp.asarray(np.int32(call.max_length)),
        stops=stops,
        allow_nonfinite=bool(config.remove_invalid_values),
        keep_scores=bool(config.output_scores),
        keep_logits=bool(config.output_logits),
        keep_hidden_states=bool(config.output_hidden_states),
        keep_attentions=bool(config.output_attentions),
    )
    return settings, time_limits
