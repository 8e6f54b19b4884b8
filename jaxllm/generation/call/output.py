"""What `generate` hands back: results fetched from the device, cut, under their public names."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.common.errors import NonFiniteError
from jaxllm.generation.call.past_key_values import PastKeyValues
from jaxllm.generation.call.placement import readable
from jaxllm.generation.call.prepare import Request
from jaxllm.generation.strategies.records import Places, as_tuples
from jaxllm.generation.strategies.strategy import AssistedCounts, Result
from jaxllm.models.outputs import Layers

Steps = tuple[Layers, ...] | None
LOOKED_AT = ("sequences", "length", "steps", "longest", "first_nonfinite_step", "over")
"""The fields of a `Result` that are read while it grows."""


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
    hidden_states: Steps = None
    """With `output_hidden_states`, of a decoder-only model: of each step a tuple over the layers,
    the embeddings first, of [Bn, T, D]. T is the length of the prompt at the first step and 1 at
    others; with `past_key_values` that of the longest new part, and each row's own stands in front.
    Of beams they are all that ran in that step, [B * num_beams, T, D]. What stands in columns of
    pads, and in rows that have ended, means nothing."""
    attentions: Steps = None
    """With `output_attentions`: likewise [Bn, heads, T, S], where S is the number of columns so
    far. Queries and keys that are pads have zeros."""
    decoder_hidden_states: Steps = None
    """`hidden_states` of an encoder-decoder's decoder."""
    decoder_attentions: Steps = None
    """`attentions` of an encoder-decoder's decoder."""
    cross_attentions: Steps = None
    """With `output_attentions`, of a model with cross-attention: [Bn, heads, T, E]."""
    past_key_values: PastKeyValues | None = None
    """With `return_past_key_values`: the cache, for the next call."""
    encoder_hidden_states: Layers = None
    """A tuple over the layers of [B, E, D]; None if the caller gave `encoder_outputs`."""
    encoder_attentions: Layers = None
    """A tuple over the layers of [B, heads, E, E]."""
    assisted: AssistedCounts | None = None
    """With a draft: how many tokens it proposed, and how many were accepted, for each row."""


def output(
    request: Request, result: Result, past: PastKeyValues | None, length: int, steps: int
) -> GenerateOutput:
    """The output for the user, cut to the longest row."""
    records = {}
    if result.records is not None:
        records = as_tuples(result.records, recorded(request), steps=steps)
    return GenerateOutput(
        **records,
        past_key_values=past,
        sequences=result.sequences[:, :length],
        scores=None if result.scores is None else tuple(result.scores[:steps]),
        logits=None if result.logits is None else tuple(result.logits[:steps]),
        sequences_scores=result.sequences_scores,
        beam_indices=None
        if result.beam_indices is None
        else result.beam_indices[:, : length - request.start_len],
        assisted=result.assisted,
    )


def recorded(request: Request) -> Places:
    """Where the columns of the result are among those that were recorded."""
    prompt, count = request.prompt, request.prompt_columns
    if prompt.past is None:
        return Places(count, np.asarray(prompt.columns), request.source_len)
    first_new, mask, at = readable((prompt.columns, prompt.mask, prompt.at), request.mesh)
    return Places(
        count,
        np.asarray(first_new),
        request.source_len,
        held=np.asarray(mask)[:, :count],
        read=int(np.max(at)) + 1,
    )


def leave(model: Any, request: Request, state: Any) -> PastKeyValues | None:
    """What the next call of a conversation starts from, where it is asked for."""
    if not request.returns_past:
        return None
    ids, mesh = request.encoder_ids, request.mesh
    cache, sequences, mask = request.strategy.leave(state)
    return PastKeyValues(
        # What the next call compares on the host; keys and values stay where they are.
        cache=cache.replace(next_position=readable(cache.next_position, mesh)),
        sequences=readable(sequences, mesh),
        mask=readable(mask, mesh),
        encoder_ids=None
        if ids is None
        else jnp.repeat(ids, sequences.shape[0] // ids.shape[0], axis=0),
        source_len=request.source_len,
        config=model.config,
    )


def looked_at(result: Result) -> Result:
    """A growing result: the few fields that are looked at meanwhile are fetched from the device,
    others, such as the scores of all steps, stay there. Raises as `on_host`."""
    light = {name: getattr(result, name) for name in LOOKED_AT}
    return unbroken(dataclasses.replace(result, **jax.device_get(light)))


def on_host(result: Result) -> Result:
    """A result fetched from the device at once; raises if a step had no finite logits."""
    return unbroken(jax.device_get(result))


def unbroken(result: Result) -> Result:
    """The result as it is.

    Raises:
        NonFiniteError: a step had no finite logits; with the step and the row.
    """
    broken = result.first_nonfinite_step
    if (broken >= 0).any():
        row = int(np.argmax(broken >= 0))
        raise NonFiniteError(
            f"generate: at new token {int(broken[row])} of row {row} the model's logits are NaN or "
            "infinite, or the settings forbid every token; check the weights and the settings, or "
            "compute in float32 (dtype='float32')"
        )
    return result
