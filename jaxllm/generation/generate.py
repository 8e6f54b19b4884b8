"""`generate()` and `stream()`: host checks, then two compiled programs, then the host again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.errors import InputError, NonFiniteError, UnsupportedError
from jaxllm.generation.config import GenerationConfig
from jaxllm.generation.loop import (
    decode,
    decode_program,
    finish,
    finish_program,
    prefill,
    prefill_program,
)
from jaxllm.generation.prepare import Request, prepare
from jaxllm.generation.strategy import AssistedCounts, Result, without_notes
from jaxllm.generation.values import is_integer

# Arguments of transformers' generate() that are not fields of the config.
INPUTS = frozenset(
    {
        "inputs_embeds",
        "token_type_ids",
        "decoder_input_ids",
        "decoder_attention_mask",
        "encoder_outputs",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "logits_processor",
        "row_ids",
    }
)
# And those that only a strategy reads (`modes.Call.arguments`).
ARGUMENTS: frozenset[str] = frozenset({"assistant_model"})
UNSUPPORTED = {
    "assistant_tokenizer": "an assistant of another vocabulary",
    "stopping_criteria": "user-written stopping criteria",
    "prefix_allowed_tokens_fn": "prefix constraints",
    "negative_prompt_ids": "classifier-free guidance",
    "negative_prompt_attention_mask": "classifier-free guidance",
    "streamer": "a streamer object (jaxllm.stream yields tokens)",
    "synced_gpus": "synced devices",
    "tokenizer": "stop_strings and token_healing",
    "position_ids": "giving positions (they follow from attention_mask)",
    "past_key_values": "a cache of the caller",
    "custom_generate": "custom_generate",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns; a pytree, so that it can leave the caller's own jit."""

    sequences: Int[Array, "Bn L"]
    """int32. Prompt (T5: start token) and new tokens; pad after a row's end. L is the longest row's
    length, or max_length when generate() runs inside the caller's jit."""
    scores: tuple[Float[Array, "Bn V"], ...] | None = None
    """With `output_scores`: the processed scores of each step, float32."""
    logits: tuple[Float[Array, "Bn V"], ...] | None = None
    """With `output_logits`: the raw logits of each step, float32."""
    assisted: AssistedCounts | None = None
    """With a draft: how many tokens it proposed, and how many were accepted, for each row."""


def generate(
    model: Any,
    input_ids: Int[Array, "B T"] | None = None,
    attention_mask: Int[Array, "B T"] | None = None,
    generation_config: GenerationConfig | None = None,
    key: Any = None,
    **fields: Any,
) -> GenerateOutput:
    """Generates token ids; transformers' generate() for a model that `jaxllm.load` returned.

    Args:
        model: a causal or encoder-decoder language model.
        input_ids: the prompt (decoder-only) or the encoder's input, padded on either side. None
            starts a decoder-only model from its BOS token.
        attention_mask: 1 at real tokens. None: all are, but that a decoder-only model recognises
            pads if the pad token ends no text.
        generation_config: settings; `fields` win over it, and it over the model's own file.
        key: `jax.random.key(...)` or an int seed, for sampling. None: a fresh one at each call.
        fields: any field of `GenerationConfig`, and the inputs `inputs_embeds`, `token_type_ids`
            (GPT-2), `decoder_input_ids` (inside jax.jit they must begin with the start token, which
            is put before them otherwise), `decoder_attention_mask`, `encoder_outputs` (T5),
            `encoder_hidden_states`, `encoder_attention_mask` (GPT-2 with cross-attention),
            `logits_processor` (a list of callables), `assistant_model` (a smaller model of the same
            vocabulary, which drafts) and `row_ids` [B], the numbers that a row's random draws
            depend on (default 0..B-1).

    Returns:
        GenerateOutput with `.sequences`, int32 [B * num_return_sequences, L].

    Raises:
        InputError: ids outside the vocabulary, lengths without room, contradictory settings.
        UnsupportedError: a setting that jaxllm does not have, by its name.
        NonFiniteError: the model gave NaN or infinite logits, with the step and row.
    """
    request = prepare_call(model, input_ids, attention_mask, generation_config, key, fields)
    bare, strategy, settings = without_notes(model), request.strategy, request.settings
    if request.traced:
        state = start(bare, request, prefill)
        state = decode(strategy, bare, state, settings, jnp.int32(request.until))
        result = finish(strategy, state, settings)
        return output(result, request.until, request.until - request.start_len)
    state = start(bare, request, prefill_program)
    state = decode_program(strategy, bare, state, settings, np.int32(request.until))
    result = on_host(finish_program(strategy, state, settings))
    return output(result, int(result.length), int(result.steps))


def stream(
    model: Any,
    input_ids: Int[Array, "B T"] | None = None,
    attention_mask: Int[Array, "B T"] | None = None,
    generation_config: GenerationConfig | None = None,
    key: Any = None,
    *,
    chunk_size: int = 1,
    **fields: Any,
) -> Iterator[np.ndarray]:
    """Like `generate`, but yields the new tokens as they come: int32 [B * n, chunk_size or fewer].

    The chunks side by side are the new columns of `generate(...).sequences`. The programs are those
    of `generate`: after one of the two has run, the other compiles nothing.
    """
    if not is_integer(chunk_size) or chunk_size < 1:
        raise InputError(f"chunk_size: expected an integer of 1 or more, found {chunk_size!r}")
    request = prepare_call(model, input_ids, attention_mask, generation_config, key, fields)
    if request.traced:
        raise InputError("stream: runs on the host, outside jax.jit; use generate inside")
    for name, kept in (
        ("output_scores", request.settings.keep_scores),
        ("output_logits", request.settings.keep_logits),
    ):
        if kept:
            raise InputError(f"{name}: stream yields tokens alone; use generate")
    return _chunks(without_notes(model), request, chunk_size)


def _chunks(bare: Any, request: Request, chunk_size: int) -> Iterator[np.ndarray]:
    strategy, settings = request.strategy, request.settings
    state = start(bare, request, prefill_program)
    shown = request.start_len
    while True:
        result = on_host(finish_program(strategy, state, settings))
        length, over = int(result.length), bool(result.over)
        if length - shown >= chunk_size or over:
            while length > shown:
                upto = min(shown + chunk_size, length)
                yield np.asarray(result.sequences[:, shown:upto])
                shown = upto
        if over:
            return
        until = min(shown + chunk_size, request.until)
        state = decode_program(strategy, bare, state, settings, np.int32(until))


def prepare_call(
    model, input_ids, attention_mask, generation_config, key, fields: Mapping[str, Any]
) -> Request:
    """Sorts keyword arguments into inputs and settings; names what does not exist."""
    if not hasattr(model, "decode"):
        raise UnsupportedError(f"generate: {type(model).__name__} has no language-model head")
    for name, feature in UNSUPPORTED.items():
        if fields.get(name) is not None:
            raise UnsupportedError(f"{name}: {feature} is not supported")
    inputs = {k: v for k, v in fields.items() if k in INPUTS}
    arguments = {k: v for k, v in fields.items() if k in ARGUMENTS}
    elsewhere = INPUTS | ARGUMENTS | UNSUPPORTED.keys()
    settings = {k: v for k, v in fields.items() if k not in elsewhere}
    return prepare(
        model, input_ids, attention_mask, generation_config, key, settings, arguments, **inputs
    )


def start(bare: Any, request: Request, run: Any) -> Any:
    """The state after prefill and the first token."""
    return run(
        request.strategy,
        bare,
        request.prompt,
        request.settings,
        capacity=request.capacity,
        room=request.room,
    )


def output(result: Result, length: int, steps: int) -> GenerateOutput:
    """The output for the user, cut to the longest row."""
    return GenerateOutput(
        sequences=result.sequences[:, :length],
        scores=None if result.scores is None else tuple(result.scores[:steps]),
        logits=None if result.logits is None else tuple(result.logits[:steps]),
        assisted=result.assisted,
    )


def on_host(result: Result) -> Result:
    """A result fetched from the device at once; raises if a step had no finite logits."""
    host = jax.device_get(result)
    broken = host.broken_at
    if (broken >= 0).any():
        row = int(np.argmax(broken >= 0))
        raise NonFiniteError(
            f"generate: at new token {int(broken[row])} of row {row} the model's logits are NaN or "
            "infinite, or the settings forbid every token; check the weights and the settings, or "
            "compute in float32 (dtype='float32')"
        )
    return host
