"""`generate()` and `stream()`: prepare a call on the host, run the compiled programs, fetch the
result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.common.arguments import checked_count
from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.common.progress import progress_phase
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.generation.call.output import (
    GenerateOutput,
    fetch_progress,
    fetch_result,
    generate_output,
    past_key_values,
)
from jaxllm.generation.call.prepare import (
    PreparedCall,
    check_memory,
    is_large,
    prepare_call,
)
from jaxllm.generation.inputs.arguments import TokenRows
from jaxllm.generation.loop import (
    decode,
    decode_program,
    finish,
    finish_program,
    of_flat_model,
    prefill,
    prefill_program,
    steps_of,
)
from jaxllm.generation.processors.host import reraise_failures
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.strategies.beam_search import end_beams
from jaxllm.generation.strategies.draws import RandomKey
from jaxllm.generation.strategies.records import check_record_size
from jaxllm.generation.strategies.strategy import RUNNING, STOP, DecodeState, Result
from jaxllm.models.decoder import GenerativeModel
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import use_mesh

Prefilled = TypeVar("Prefilled")
"""DecodeState of a program that ran, or what tracing it returns."""


class Streamer(Protocol):
    """Receiver of tokens while a call runs, as transformers' `BaseStreamer`."""

    def put(self, value: np.ndarray) -> None: ...

    def end(self) -> None: ...


def generate(
    model: GenerativeModel,
    input_ids: TokenRows | None = None,
    attention_mask: TokenRows | None = None,
    generation_config: GenerationConfig | Mapping[str, Any] | None = None,
    key: RandomKey = None,
    **fields: Any,
) -> GenerateOutput:
    """Generates token ids, like transformers' `generate()`; also works inside `jax.jit`.

    B: batch size. T: columns of a prompt. E: columns of an encoder's input. D: width of the model.
    n: `num_return_sequences`. `stream` takes the same arguments.

    Args:
        model: a decoder-only or encoder-decoder language model, as `jaxllm.load` returns it.
        input_ids: int [B, T], the prompts (decoder-only) or the encoder's input (encoder-decoder),
            padded on either side. None: a decoder-only model starts from its BOS token.
        attention_mask: bool or 0/1 [B, T], 1 at real tokens. None: all tokens; a decoder-only
            model masks `pad_token_id` unless it is an end token.
        generation_config: settings. `fields` override them, and they override the model's own
            generation config.
        key: `jax.random.key(...)` or an int seed, for sampling. None: a fresh key at each call.
        fields: any field of `GenerationConfig`, and these arguments:

            - `inputs_embeds` float [B, T, D], in place of `input_ids` or with them;
              `token_type_ids` int [B, T] (GPT-2).
            - `decoder_input_ids` int [B, T] and `decoder_attention_mask` (encoder-decoders): the
              decoder's prompt. The start token is prepended, unless a row begins with it; inside
              jax.jit the prompt must include it. With `encoder_outputs` float [B, E, D] the encoder
              does not run.
            - `encoder_hidden_states` float [B, E, D] and `encoder_attention_mask` [B, E] (GPT-2
              with cross-attention).
            - `negative_prompt_ids` int [B, T], `negative_prompt_attention_mask` (guidance).
            - `logits_processor`, `stopping_criteria`: lists of callables.
              `prefix_allowed_tokens_fn`: `(batch_id, ids) -> token ids`.
            - `tokenizer`, for `stop_strings` and `token_healing`.
            - `assistant_model`: a smaller model of the same vocabulary, which drafts tokens.
            - `streamer`: an object with `put` and `end`, called on the host after each token.
            - `row_ids` int [B], default 0..B-1: a row draws by `key` and its id alone.
            - `rope_length="row"`: dynamic and longrope RoPE use the length of each row alone.
              The default, "batch", is the length of the longest row, as in transformers.
            - `return_past_key_values=True` returns the KV cache. A later call takes it as
              `past_key_values`, with the whole conversation as `input_ids` (encoder-decoders:
              `decoder_input_ids`, without the encoder's input), and computes only the new part.

    Returns:
        GenerateOutput with `sequences`, int32 [B * n, L]: numpy arrays, or traced arrays inside
        jax.jit. The n results of a row are adjacent.

    Raises:
        InputError: ids outside the vocabulary, shapes that do not fit each other, more columns than
            the model has positions, contradictory settings, unknown fields.
        UnsupportedError: a setting that jaxllm does not support; the message names it.
        NonFiniteError: the logits are NaN or infinite; the message names the step and the row. Not
            raised inside jax.jit.
    """
    streamer = fields.pop("streamer", None)
    if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InputError(
            f"streamer: expected an object with put() and end(), found {quoted(streamer)}"
        )
    call = prepare_call(model, input_ids, attention_mask, generation_config, key, fields)
    with use_mesh(call.mesh), generating(call, streamer):
        return run(call, streamer)


def generating(call: PreparedCall, streamer: Streamer | None) -> AbstractContextManager[Any]:
    """The progress phase of a call; none inside jax.jit or with a streamer, which may print."""
    if call.traced or streamer is not None:
        return nullcontext()
    rows, new_tokens = call.request.batch, call.request.max_new_tokens
    return progress_phase(f"generating, rows: {rows}, new tokens: up to {new_tokens}")


def stream(
    model: GenerativeModel,
    input_ids: TokenRows | None = None,
    attention_mask: TokenRows | None = None,
    generation_config: GenerationConfig | Mapping[str, Any] | None = None,
    key: RandomKey = None,
    *,
    chunk_size: int = 1,
    **fields: Any,
) -> Iterator[np.ndarray]:
    """Generates like `generate`, and yields the new tokens in chunks.

    It runs the compiled programs of `generate`: after one of the two has run, the other compiles
    nothing. Arguments are checked when `stream` is called, before the first chunk is requested.

    Args:
        model, input_ids, attention_mask, generation_config, key, fields: as `generate`.
        chunk_size: columns of a chunk; the last one may have fewer.

    Returns:
        An iterator over chunks, int32 [B * num_return_sequences, chunk_size] on the host.
        Concatenated along axis 1 they are the new columns of `generate(...).sequences`.

    Raises:
        InputError: as `generate`, and for settings that request more than tokens (`output_scores`,
            `return_past_key_values`, ...).
        UnsupportedError: as `generate`, and for beams, whose tokens are final only at the end.
        NonFiniteError: as `generate`, at the step where it happens.
    """
    checked_count(chunk_size, "chunk_size")
    call = prepare_call(model, input_ids, attention_mask, generation_config, key, fields)
    if call.traced:
        raise InputError("stream: runs on the host, outside jax.jit; use generate inside")
    if not call.strategy.can_stream:
        raise UnsupportedError(
            "stream: the tokens of beams are final at the end only; use generate, or num_beams=1"
        )
    settings = call.settings
    for name, is_set in (
        ("output_scores", settings.keep_scores),
        ("output_logits", settings.keep_logits),
        ("output_hidden_states", settings.keep_hidden_states),
        ("output_attentions", settings.keep_attentions),
        ("return_past_key_values", call.request.arguments.return_past_key_values),
    ):
        if is_set:
            raise InputError(f"{name}: stream yields tokens alone; use generate")
    return _chunks(call, chunk_size)


def compile_programs(
    model: GenerativeModel,
    input_ids: TokenRows | None = None,
    attention_mask: TokenRows | None = None,
    generation_config: GenerationConfig | Mapping[str, Any] | None = None,
    key: RandomKey = None,
    **fields: Any,
) -> None:
    """Compiles the programs of a call of `generate` or `stream`, whose arguments it takes.

    The model's parameters may be `jax.ShapeDtypeStruct`, as those that `jaxllm.load` gives to
    `while_loading`.
    """
    call = prepare_call(model, input_ids, attention_mask, generation_config, key, fields)
    strategy, settings = call.strategy, call.settings
    compilations: list[Future[Any]] = []
    with use_mesh(call.mesh), ThreadPoolExecutor(1) as compiler:

        def compiled(program: Any) -> Callable[..., Any]:
            """A function that compiles a program for its arguments, and returns result shapes."""

            def compile_for(*arguments: Any, **static: Any) -> Any:
                lowered = program.lower(*arguments, **static)
                shapes = program.eval_shape(*arguments, **static)
                if call.mesh is None:  # an array that is committed to no device has no sharding
                    # While this program compiles, or comes from the cache, the next one is traced.
                    work = with_settings_of_this_thread(lowered.compile)
                    compilations.append(compiler.submit(work))
                    return shapes
                return jax.tree.map(
                    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                    shapes,
                    lowered.compile().output_shardings,
                )

            return compile_for

        state = run_prefill(call, compiled(prefill_program))
        if needs_decoding(call):
            compiled(decode_program)(*decode_arguments(call, state, call.request.max_length))
        compiled(finish_program)(strategy, state, settings)
    for compilation in compilations:
        compilation.result()  # raises what the compiler raised


def _chunks(call: PreparedCall, chunk_size: int) -> Iterator[np.ndarray]:
    yielded = call.request.start_len
    results = partial_results(call, chunk_size)
    take = jax.transfer_guard_host_to_device("allow")(next)  # not in what the caller does between
    while (found := take(results, None)) is not None:
        result, _ = found
        length = int(result.length)
        if length - yielded >= chunk_size or result.all_finished:
            while length > yielded:
                end = min(yielded + chunk_size, length)
                yield np.asarray(result.sequences[:, yielded:end])
                yielded = end


@jax.transfer_guard_host_to_device("allow")  # of the arrays that were prepared
def run(call: PreparedCall, streamer: Streamer | None) -> GenerateOutput:
    """Runs the programs of a call: prefill, decode loop and finish."""
    strategy, settings, model = call.strategy, call.settings, call.model
    max_length = call.request.max_length
    if call.traced:
        for name, on_host in (("streamer", streamer), ("max_time", call.time_limits)):
            if on_host:
                raise InputError(f"{name}: works on the host, outside jax.jit")
        state = run_prefill(call, of_flat_model(prefill))
        state = of_flat_model(decode)(strategy, model, state, settings, jnp.int32(max_length))
        result = finish(strategy, state, settings)
        past = past_key_values(call, state)
        return generate_output(call, result, past, max_length, max_length - call.request.start_len)
    if streamer is not None or call.time_limits:
        result, state = run_by_token(call, streamer)
    else:
        with reraise_failures():
            state = run_prefill(call, prefill_program)
            if needs_decoding(call):
                state = run_decode(call, state, max_length)
            result = fetch_result(call, finish_program(strategy, state, settings))
    past = past_key_values(call, state)
    return generate_output(call, result, past, int(result.length), int(result.steps))


def needs_decoding(call: PreparedCall) -> bool:
    """True if a token may be left after prefill."""
    return call.request.max_new_tokens > 1 or not call.strategy.chooses_in_prefill


def run_by_token(call: PreparedCall, streamer: Streamer | None) -> tuple[Result, DecodeState]:
    """Runs a call token by token, for a streamer or a time limit. Returns the result and the state.

    As in transformers, the streamer's `put` gets the prompt [B, T], then every step's tokens [B],
    and its `end()` is called last.
    """
    if streamer is not None:
        if not call.strategy.can_stream:
            raise UnsupportedError("streamer: cannot be used with beams; set num_beams=1")
        streamer.put(jax.device_get(call.inputs.sequences)[:, : call.request.start_len])
    streamed = call.request.start_len
    last = None
    for last in partial_results(call, chunk=1):
        result, _ = last
        if streamer is not None:
            for column in range(streamed, int(result.length)):
                streamer.put(np.asarray(result.sequences[:, column]))
        streamed = int(result.length)
    if streamer is not None:
        streamer.end()
    assert last is not None
    result, state = last
    return fetch_result(call, result), state


def partial_results(call: PreparedCall, chunk: int) -> Iterator[tuple[Result, DecodeState]]:
    """Yields the result so far and the state, after the first token and then at every multiple of
    `chunk` new tokens.

    Only the fields of `PROGRESS_FIELDS` are on the host. The state and the other fields are valid
    until the next result is requested, since the loop donates their buffers.
    """
    strategy, settings, beams = call.strategy, call.settings, not call.strategy.can_stream
    state, next_length = None, 0
    while True:
        with use_mesh(call.mesh), reraise_failures():
            if state is None:
                state = run_prefill(call, prefill_program)
            else:
                state = run_decode(call, state, next_length)
            result = fetch_progress(call, finish_program(strategy, state, settings))
        expired = any(limit.expired() for limit in call.time_limits)
        if expired and not beams:
            longest = result.length if result.longest is None else result.longest
            steps = longest - call.request.start_len
            reasons = result.finish_reasons
            result = dataclasses.replace(
                result,
                finish_reasons=np.where(reasons == RUNNING, STOP, reasons),
                length=longest,
                steps=steps,
            )
        elif expired:
            with use_mesh(call.mesh), reraise_failures():
                state = end_beams(strategy, state)
                result = fetch_progress(call, finish_program(strategy, state, settings))
        yield result, state
        if result.all_finished:
            return
        length = call.request.start_len + int(result.steps) if beams else int(result.length)
        chunks = (length - call.request.start_len) // chunk + 1
        next_length = min(call.request.start_len + chunks * chunk, call.request.max_length)


def run_prefill(call: PreparedCall, program: Callable[..., Prefilled]) -> Prefilled:
    """Runs prefill and chooses the first token; returns what `program` returns: the state.

    Args:
        program: `prefill_program`, or `prefill` of a flat model inside the caller's jit.
    """
    settings = call.settings
    arguments = (call.strategy, call.model, call.inputs, settings)
    sizes = {
        "capacity": call.capacity,
        "new_token_bucket": call.request.new_token_bucket,
        "chunk_size": call.chunk_size,
    }
    has_records = settings.keep_hidden_states or settings.keep_attentions
    predicts_memory = not call.traced and is_large(call)
    if has_records or predicts_memory:
        # This traces the program; the call below reuses the trace.
        state = prefill_program.eval_shape(*arguments, **sizes)
        check_record_size(state.records)
        if predicts_memory:
            check_memory(call, state)
    return program(*arguments, **sizes)


def run_decode(call: PreparedCall, state: Prefilled, max_length: int) -> Prefilled:
    """`decode`, compiled; checks as often as suits the platform whether a row is unfinished."""
    return decode_program(*decode_arguments(call, state, max_length))


def decode_arguments(call: PreparedCall, state: Any, max_length: int) -> tuple[Any, ...]:
    """Arguments of `decode_program`."""
    steps = steps_of(call.strategy, call.settings, platform_of_arrays(state.reason))
    return call.strategy, call.model, state, call.settings, np.int32(max_length), steps
