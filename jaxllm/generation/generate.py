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
from jaxllm.generation.guidance import Guided
from jaxllm.generation.healing import heal_tokens
from jaxllm.generation.loop import (
    decode,
    decode_program,
    finish,
    finish_program,
    prefill,
    prefill_program,
)
from jaxllm.generation.prepare import Request, prepare
from jaxllm.generation.processors.host_errors import reraised
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
# And those that only a strategy, a criterion or guidance reads (`modes.Call.arguments`).
ARGUMENTS = frozenset(
    {
        *("assistant_model", "tokenizer", "stopping_criteria", "prefix_allowed_tokens_fn"),
        *("negative_prompt_ids", "negative_prompt_attention_mask"),
    }
)
UNSUPPORTED = {
    "assistant_tokenizer": "an assistant of another vocabulary",
    "synced_gpus": "synced devices",
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
    sequences_scores: Float[Array, " Bn"] | None = None
    """Of beams: the score of each text, its length penalty included."""
    beam_indices: Int[Array, "Bn N"] | None = None
    """Of beams: for each new token the beam, counted over the whole batch, that it was chosen
    from; -1 after the end."""
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
            `negative_prompt_ids` [B, T] and `negative_prompt_attention_mask` (with guidance_scale),
            `logits_processor` and `stopping_criteria` (lists of callables),
            `prefix_allowed_tokens_fn` (`(batch_id, ids) -> token ids`), `tokenizer` (for
            `stop_strings` and `token_healing`), `assistant_model` (a smaller model of the same
            vocabulary, which drafts), `streamer` (an object with `put` and `end`, called
            on the host) and `row_ids` [B], the numbers that a row's
            random draws depend on (default 0..B-1).

    Returns:
        GenerateOutput with `.sequences`, int32 [B * num_return_sequences, L].

    Raises:
        InputError: ids outside the vocabulary, lengths without room, contradictory settings.
        UnsupportedError: a setting that jaxllm does not have, by its name.
        NonFiniteError: the model gave NaN or infinite logits, with the step and row.
    """
    streamer = fields.pop("streamer", None)
    request = prepare_call(model, input_ids, attention_mask, generation_config, key, fields)
    bare, strategy, settings = runnable(model, request), request.strategy, request.settings
    start_len = request.start_len
    if request.traced:
        for name, given in (("streamer", streamer), ("max_time", request.clocks)):
            if given:
                raise InputError(f"{name}: works on the host, outside jax.jit")
        state = start(bare, request, prefill)
        state = decode(strategy, bare, state, settings, jnp.int32(request.until))
        result = finish(strategy, state, settings)
        return output(result, start_len, request.until, request.until - start_len)
    if streamer is not None or request.clocks:
        result = watched(bare, request, streamer)
    else:
        with reraised():
            state = start(bare, request, prefill_program)
            state = decode_program(strategy, bare, state, settings, np.int32(request.until))
            result = on_host(finish_program(strategy, state, settings))
    return output(result, start_len, int(result.length), int(result.steps))


def watched(bare: Any, request: Request, streamer: Any) -> Result:
    """Runs token by token, since somebody looks at each: a streamer, or a clock.

    The streamer's `put` gets the prompt [B, T], then every step's tokens [B], then `end()` is
    called, as transformers' streamers are.
    """
    if streamer is not None:
        if not request.strategy.streams:
            raise UnsupportedError("streamer: cannot be used with beams; set num_beams=1")
        streamer.put(np.asarray(request.prompt.sequences)[:, : request.start_len])
    shown = request.start_len
    result = None
    for result in results(bare, request, chunk=1):
        if streamer is not None:
            for column in range(shown, int(result.length)):
                streamer.put(np.asarray(result.sequences[:, column]))
        shown = int(result.length)
    if streamer is not None:
        streamer.end()
    assert result is not None
    return result


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
    ):
        if kept:
            raise InputError(f"{name}: stream yields tokens alone; use generate")
    return _chunks(runnable(model, request), request, chunk_size)


def _chunks(bare: Any, request: Request, chunk_size: int) -> Iterator[np.ndarray]:
    shown = request.start_len
    for result in results(bare, request, chunk_size):
        length = int(result.length)
        if length - shown >= chunk_size or result.over:
            while length > shown:
                upto = min(shown + chunk_size, length)
                yield np.asarray(result.sequences[:, shown:upto])
                shown = upto


def results(bare: Any, request: Request, chunk: int) -> Iterator[Result]:
    """The result so far, after the first token and then at every multiple of `chunk` new ones."""
    strategy, settings, beams = request.strategy, request.settings, not request.strategy.streams
    state, until = None, 0
    while True:
        with reraised():
            if state is None:
                state = start(bare, request, prefill_program)
            else:
                state = decode_program(strategy, bare, state, settings, np.int32(until))
            result = on_host(finish_program(strategy, state, settings))
        late = any(clock.expired() for clock in request.clocks)
        result = dataclasses.replace(result, over=result.over or (late and not beams))
        yield result
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
    for name, feature in UNSUPPORTED.items():
        if fields.get(name) is not None:
            raise UnsupportedError(f"{name}: {feature} is not supported")
    inputs = {k: v for k, v in fields.items() if k in INPUTS}
    arguments = {k: v for k, v in fields.items() if k in ARGUMENTS}
    elsewhere = INPUTS | ARGUMENTS | UNSUPPORTED.keys()
    settings = {k: v for k, v in fields.items() if k not in elsewhere}
    return prepare(
        model,
        input_ids,
        attention_mask,
        generation_config,
        key,
        settings,
        arguments,
        heal=heal,
        **inputs,
    )


def heal(model: Any, tokenizer: Any, input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Prompts whose last tokens may be spelled in another way (`token_healing`), and their mask."""
    if model.is_encoder_decoder:
        raise UnsupportedError("token_healing: mends prompts of decoder-only models")

    def one_more(row: np.ndarray, sequence_bias: Any) -> int:
        out = generate(
            model,
            jnp.asarray(row[None]),
            max_new_tokens=1,
            pad_token_id=tokenizer.pad_token_id,
            sequence_bias=sequence_bias,
            token_healing=False,
            do_sample=False,
        )
        return int(out.sequences[0, -1])

    if input_ids is None:
        raise InputError("token_healing: needs input_ids")
    if attention_mask is None:
        attention_mask = np.ones(np.shape(input_ids), bool)
    return heal_tokens(np.asarray(input_ids), np.asarray(attention_mask), tokenizer, one_more)


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


def runnable(model: Any, request: Request) -> Any:
    """What the compiled programs run: the model, followed by its unconditional contexts if any."""
    bare = without_notes(model)
    return bare if request.negative is None else Guided(bare, request.negative)


def output(result: Result, start_len: int, length: int, steps: int) -> GenerateOutput:
    """The output for the user, cut to the longest row."""
    return GenerateOutput(
        sequences=result.sequences[:, :length],
        scores=None if result.scores is None else tuple(result.scores[:steps]),
        logits=None if result.logits is None else tuple(result.logits[:steps]),
        sequences_scores=result.sequences_scores,
        beam_indices=None
        if result.beam_indices is None
        else result.beam_indices[:, : length - start_len],
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
