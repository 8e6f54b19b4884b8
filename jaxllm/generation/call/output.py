"""Output of `generate`: fetches results from the device, cuts padding and names the fields."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxllm.generation.call.past_key_values import PastKeyValues
from jaxllm.generation.call.prepare import PreparedCall
from jaxllm.generation.strategies.records import RecordColumns, as_tuples
from jaxllm.generation.strategies.strategy import (
    FINISH_REASONS,
    NONFINITE,
    AssistedCounts,
    DecodeState,
    Result,
    nonfinite_error,
)
from jaxllm.models.outputs import ModelOutput, PerLayer

T = TypeVar("T")
PerStep = tuple[PerLayer, ...] | None
"""Tuple over the steps of tuples over the layers, or None."""
PROGRESS_FIELDS = ("sequences", "length", "steps", "longest", "lengths", "finish_reasons")
"""Fields of a `Result` that are fetched while generation is running."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GenerateOutput(ModelOutput):
    """Output of `generate`. A pytree, so that the caller's jitted function can return it.
    Fields are read by attribute, name or index (`ModelOutput`).

    Bn: results, `num_return_sequences` adjacent rows for each prompt. Rows: rows of a decode step,
    which are the results or all beams. N: number of steps. V: vocabulary size.
    """

    sequences: Int[Array, "Bn L"]
    """int32. Prompt (T5: start token) and new tokens; pad after a row's end. L is the length of the
    longest row, or max_length when generate() runs inside the caller's jit."""
    scores: tuple[Float[Array, "Rows V"], ...] | None = None
    """With `output_scores`: the processed scores of each step, float32. Undefined in finished rows,
    where transformers goes on decoding after pad tokens."""
    logits: tuple[Float[Array, "Rows V"], ...] | None = None
    """With `output_logits`: the raw logits of each step, float32. Undefined in finished rows."""
    sequences_scores: Float[Array, " Bn"] | None = None
    """With beams, float32: score of each sequence, length penalty included."""
    beam_indices: Int[Array, "Bn N"] | None = None
    """With beams, int32: the beam that each new token was chosen from, numbered over the whole
    batch; -1 after the end."""
    hidden_states: PerStep = None
    """With `output_hidden_states` (decoder-only models): for each step a tuple over the layers, the
    embeddings first, of [Bn, T, D]. T is the length of the prompt at the first step and 1 at the
    others; with `past_key_values` the first T is the length of the longest new part, and shorter
    ones are padded on the right. With beams the rows are all beams of that step,
    [B * num_beams, T, D]. Values at padding and in finished rows are undefined."""
    attentions: PerStep = None
    """With `output_attentions`: attention weights in the same order, [Bn, heads, T, S], where S is
    the number of columns so far. 0 for queries and keys that are padding."""
    decoder_hidden_states: PerStep = None
    """`hidden_states` of an encoder-decoder's decoder."""
    decoder_attentions: PerStep = None
    """`attentions` of an encoder-decoder's decoder."""
    cross_attentions: PerStep = None
    """With `output_attentions` (models with cross-attention): [Bn, heads, T, E]."""
    past_key_values: PastKeyValues | None = None
    """With `return_past_key_values`: the KV cache, for the next call."""
    encoder_hidden_states: PerLayer = None
    """With `output_hidden_states`: a tuple over the layers of [B, E, D], or None if the caller gave
    `encoder_outputs`."""
    encoder_attentions: PerLayer = None
    """With `output_attentions`: a tuple over the layers of [B, heads, E, E]."""
    assisted: AssistedCounts | None = None
    """With a draft: counts of proposed and accepted tokens for each row."""
    lengths: Int[Array, " Bn"] = dataclasses.field(kw_only=True)
    """int32. Number of new tokens of each sequence, the end token included; what follows in
    `sequences` is padding."""
    finish_reasons: Int[Array, " Bn"] = dataclasses.field(kw_only=True)
    """int32. Why each sequence ended, as a code. `finish_reason_names` gives the names."""

    def new_tokens(self, start: int) -> list[list[int]]:
        """The new tokens of each sequence, the end token included, without padding.

        Runs on the host, so it cannot be called inside `jax.jit`.

        Args:
            start: columns of the prompt in `sequences`. For a decoder-only model that is the width
                of `input_ids`, and for an encoder-decoder 1, the start token.
        """
        rows = zip(np.asarray(self.sequences), np.asarray(self.lengths), strict=True)
        return [row[start : start + length].tolist() for row, length in rows]

    def finish_reason_names(self) -> list[str]:
        """The names of `finish_reasons`. Runs on the host, so it cannot be called inside `jax.jit`.

        "eos" is an end token. "length" is the limit, also where `forced_eos_token_id` wrote an end
        token at it. "stop" is a stop string, a stopping criterion or `max_time`. "nonfinite" stands
        for NaN or infinite logits inside `jax.jit`, where they raise no error.
        """
        return np.array(FINISH_REASONS)[np.asarray(self.finish_reasons)].tolist()


def generate_output(
    call: PreparedCall, result: Result, past: PastKeyValues | None, length: int, steps: int
) -> GenerateOutput:
    """Builds the public output, cut to the longest row.

    Args:
        length: columns of the longest row.
        steps: decode steps, the first token's included.
    """
    records = {}
    if result.records is not None:
        records = as_tuples(result.records, record_columns(call), steps=steps)
    new_tokens = length - call.request.start_len
    beam_indices = result.beam_indices
    return GenerateOutput(
        **records,
        past_key_values=past,
        sequences=result.sequences[:, :length],
        scores=None if result.scores is None else tuple(result.scores[:steps]),
        logits=None if result.logits is None else tuple(result.logits[:steps]),
        sequences_scores=result.sequences_scores,
        beam_indices=None if beam_indices is None else beam_indices[:, :new_tokens],
        assisted=result.assisted,
        lengths=result.lengths,
        finish_reasons=result.finish_reasons,
    )


def record_columns(call: PreparedCall) -> RecordColumns:
    """Maps columns of the result to columns of its records."""
    arrays, count = call.inputs, call.request.prompt.length
    if arrays.past_cache is None:
        return RecordColumns(count, np.asarray(arrays.cache_len), call.request.encoder_len)
    first_new, mask, last_column = on_every_process(
        (arrays.cache_len, arrays.mask, arrays.last_column), call.mesh
    )
    return RecordColumns(
        count,
        np.asarray(first_new),
        call.request.encoder_len,
        prompt_mask=np.asarray(mask)[:, :count],
        prefilled=int(np.max(last_column)) + 1,
    )


def past_key_values(call: PreparedCall, state: DecodeState) -> PastKeyValues | None:
    """Cache for the next call of a conversation; None unless `return_past_key_values` is set.

    Args:
        state: the last state of the strategy.
    """
    if not call.request.arguments.return_past_key_values:
        return None
    encoder_input, mesh = call.request.encoder_input, call.mesh
    ids = None if encoder_input is None else encoder_input.ids
    returned = call.strategy.returned_cache(state)
    next_position = on_every_process(returned.cache.next_position, mesh)
    if ids is not None:
        ids = jnp.repeat(ids, returned.sequences.shape[0] // ids.shape[0], axis=0)
    return PastKeyValues(
        # The next call compares tokens on the host; keys and values keep their sharding.
        cache=returned.cache.replace(next_position=next_position),
        sequences=on_every_process(returned.sequences, mesh),
        mask=on_every_process(returned.mask, mesh),
        encoder_ids=ids,
        encoder_len=call.request.encoder_len,
        config=call.request.model.forward_config,
    )


def on_every_process(tree: T, mesh: Mesh | None) -> T:
    """Replicates arrays on a multi-process mesh, so that every process can read them."""
    if mesh is None or not mesh.is_multi_process:
        return tree
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, everywhere), tree)


def fetch_progress(call: PreparedCall, result: Result) -> Result:
    """Fetches the `PROGRESS_FIELDS` of an unfinished result; others, such as the scores of all
    steps, stay on the device. Raises as `fetch_result`."""
    progress = {name: getattr(result, name) for name in PROGRESS_FIELDS}
    result = dataclasses.replace(result, **jax.device_get(progress))
    check_finite(call, result)
    return result


def fetch_result(call: PreparedCall, result: Result) -> Result:
    """Fetches a result from the device.

    Raises:
        NonFiniteError: a step had no finite logits; the message names the step and the row.
    """
    result = jax.device_get(result)
    check_finite(call, result)
    return result


def check_finite(call: PreparedCall, result: Result) -> None:
    """Raises NonFiniteError with the step and the row if a step had no finite logits."""
    is_bad = result.finish_reasons == NONFINITE
    if is_bad.any():
        sequence, rows = int(np.argmax(is_bad)), len(call.inputs.keys)
        # All sequences of a row of beams end with it; samples are rows of their own.
        row = sequence * rows // len(is_bad)
        raise nonfinite_error(int(result.lengths[sequence]), row)
