"""`generate()` and `stream()`: host checks, then the compiled programs, then the host again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.call.output import GenerateOutput, leave, looked_at, on_host, output
from jaxllm.generation.call.placement import placed, shared_key
from jaxllm.generation.call.prepare import Request, prepare
from jaxllm.generation.inputs.arguments import sorted_keywords
from jaxllm.generation.inputs.values import is_integer
from jaxllm.generation.loop import (
    decode,
    decode_program,
    finish,
    finish_program,
    prefill,
    prefill_program,
)
from jaxllm.generation.processors.host.errors import reraised
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.strategies.guidance import Guided
from jaxllm.generation.strategies.records import check_size
from jaxllm.generation.strategies.strategy import Result
from jaxllm.models.model import without_metadata
from jaxllm.parallel.placement import mesh_of
from jaxllm.parallel.sharding import use


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
            `negative_prompt_ids` [B, T] and `negative_prompt_attention_mask` (with guidance_scale),
            `logits_processor` and `stopping_criteria` (lists of callables),
            `prefix_allowed_tokens_fn` (`(batch_id, ids) -> token ids`), `tokenizer` (for
            `stop_strings` and `token_healing`), `assistant_model` (a smaller model of the same
            vocabulary, which drafts), `streamer` (an object with `put` and `end`, called on the
            host) and `row_ids` [B], the numbers that a row's random draws depend on (default
            0..B-1). `return_past_key_values=True` asks for the cache; given to a later call as
            `past_key_values`, with the whole conversation as `input_ids` (T5: as
            `decoder_input_ids`, and no encoder's input), it saves reading the old part again.

    Returns:
        GenerateOutput with `.sequences`, int32 [B * num_return_sequences, L].

    Raises:
        InputError: ids outside the vocabulary, lengths without room, contradictory settings.
        UnsupportedError: a setting that jaxllm does not have, by its name.
        NonFiniteError: the model gave NaN or infinite logits, with the step and row.
    """
    streamer = fields.pop("streamer", None)
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InputError(f"streamer: expected an object with put() and end(), found {streamer!r}")
    request = prepare_call(model, input_ids, attention_mask, generation_config, key, fields)
    with use(request.mesh):
        return run(model, request, streamer)


def run(model: Any, request: Request, streamer: Any) -> GenerateOutput:
    """Prefill, the loop, the end."""
    bare, strategy, settings = runnable(model, request), request.strategy, request.settings
    if request.traced:
        for name, given in (("streamer", streamer), ("max_time", request.clocks)):
            if given:
                raise InputError(f"{name}: works on the host, outside jax.jit")
        state = start(bare, request, prefill)
        state = decode(strategy, bare, state, settings, jnp.int32(request.until))
        result = finish(strategy, state, settings)
        past = leave(model, request, state)
        return output(request, result, past, request.until, request.until - request.start_len)
    if streamer is not None or request.clocks:
        result, state = watched(bare, request, streamer)
    else:
        with reraised():
            state = start(bare, request, prefill_program)
            state = decode_program(strategy, bare, state, settings, np.int32(request.until))
            result = on_host(finish_program(strategy, state, settings))
    past = leave(model, request, state)
    return output(request, result, past, int(result.length), int(result.steps))


def watched(bare: Any, request: Request, streamer: Any) -> tuple[Result, Any]:
    """Runs token by token, since somebody looks at each: a streamer, or a clock.

    The streamer's `put` gets the prompt [B, T], then every step's tokens [B], then `end()` is
    called, as transformers' streamers are.
    """
    if streamer is not None:
        if not request.strategy.streams:
            raise UnsupportedError("streamer: cannot be used with beams; set num_beams=1")
        streamer.put(np.asarray(request.prompt.sequences)[:, : request.start_len])
    shown = request.start_len
    last = None
    for last in results(bare, request, chunk=1):
        result, _ = last
        if streamer is not None:
            for column in range(shown, int(result.length)):
                streamer.put(np.asarray(result.sequences[:, column]))
        shown = int(result.length)
    if streamer is not None:
        streamer.end()
    assert last is not None
    result, state = last
    return on_host(result), state


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
    if not request.strategy.streams:
        raise UnsupportedError("stream: beams change their minds; a token is final at the end only")
    for name, kept in (
        ("output_scores", request.settings.keep_scores),
        ("output_logits", request.settings.keep_logits),
        ("output_hidden_states", request.settings.keep_hidden_states),
        ("output_attentions", request.settings.keep_attentions),
        ("return_past_key_values", request.returns_past),
    ):
        if kept:
            raise InputError(f"{name}: stream yields tokens alone; use generate")
    return _chunks(runnable(model, request), request, chunk_size)


def _chunks(bare: Any, request: Request, chunk_size: int) -> Iterator[np.ndarray]:
    shown = request.start_len
    for result, _ in results(bare, request, chunk_size):
        length = int(result.length)
        if length - shown >= chunk_size or result.over:
            while length > shown:
                upto = min(shown + chunk_size, length)
                yield np.asarray(result.sequences[:, shown:upto])
                shown = upto


def results(bare: Any, request: Request, chunk: int) -> Iterator[tuple[Result, Any]]:
    """The result so far, and the state, after the first token and then at every multiple of `chunk`
    new ones. A state, and what of a result is still on the device, is good until the next is asked
    for.
    """
    strategy, settings, beams = request.strategy, request.settings, not request.strategy.streams
    state, until = None, 0
    while True:
        with use(request.mesh), reraised():
            if state is None:
                state = start(bare, request, prefill_program)
            else:
                state = decode_program(strategy, bare, state, settings, np.int32(until))
            result = looked_at(finish_program(strategy, state, settings))
        late = any(clock.expired() for clock in request.clocks)
        if late and not beams:
            longest = result.length if result.longest is None else result.longest
            steps = longest - request.start_len
            result = dataclasses.replace(result, over=True, length=longest, steps=steps)
        yield result, state
        if result.over:
            return
        reached = request.start_len + int(result.steps) if beams else int(result.length)
        chunks = (reached - request.start_len) // chunk + 1
        until = min(request.start_len + chunks * chunk, request.until)
        if late:  # the last step of beams: every candidate ends
            until = reached + 1
            settings = dataclasses.replace(settings, max_length=np.int32(until))


def prepare_call(
    model, input_ids, attention_mask, generation_config, key, fields: Mapping[str, Any]
) -> Request:
    """Sorts keyword arguments into inputs and settings; names what does not exist."""
    if not hasattr(model, "decode"):
        raise UnsupportedError(f"generate: {type(model).__name__} has no language-model head")
    keywords, mesh = sorted_keywords(fields), mesh_of(model)
    request = prepare(
        model,
        input_ids,
        attention_mask,
        generation_config,
        shared_key(key, mesh),
        keywords.settings,
        keywords.arguments,
        **keywords.inputs,
    )
    return request if mesh is None or request.traced else placed(request, mesh)


def start(bare: Any, request: Request, run: Any) -> Any:
    """The state after prefill and the first token."""
    settings = request.settings
    arguments = (request.strategy, bare, request.prompt, settings)
    sizes = {"capacity": request.capacity, "room": request.room}
    if settings.keep_hidden_states or settings.keep_attentions:
        # Traced here, and found traced by the run.
        check_size(prefill_program.eval_shape(*arguments, **sizes).records)
    return run(*arguments, **sizes)


def runnable(model: Any, request: Request) -> Any:
    """What the compiled programs run: the model, followed by its unconditional contexts if any."""
    bare = without_metadata(model)
    return bare if request.negative is None else Guided(bare, request.negative)
