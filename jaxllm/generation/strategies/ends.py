"""The reason why each returned sequence ended, as codes on the device and names on the host."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.generation.processors import ForcedEOSTokenLogitsProcessor
from jaxllm.generation.strategies.strategy import DecodeSettings, SequenceEnds, is_eos

EOS, LENGTH, STOP = range(3)
FINISH_REASONS = ("eos", "length", "stop")
"""Names of the codes `EOS`, `LENGTH` and `STOP`, in this order. "eos": an end token. "length": the
limit, also where `forced_eos_token_id` wrote an end token at it. "stop": a stop string, a stopping
criterion or `max_time`."""


def finish_reasons(
    sequences: Int[Array, "R L"], ends: SequenceEnds, settings: DecodeSettings
) -> Int[Array, " R"]:
    """Computes the code of each sequence's finish reason, int32.

    Args:
        sequences: prompts and new tokens of the R returned sequences.
        settings: those of the call, whose `max_length` is the limit.
    """
    end = ends.start_len + ends.lengths
    last = jnp.take_along_axis(sequences, jnp.maximum(end - 1, 0)[:, None], axis=1)[:, 0]
    has_eos = is_eos(last, settings.eos) & (ends.lengths > 0)
    is_full = end >= settings.max_length
    forces_eos = any(isinstance(p, ForcedEOSTokenLogitsProcessor) for p in settings.processors)
    with_eos = jnp.where(is_full & forces_eos, LENGTH, EOS)
    without_eos = jnp.where(is_full & ~ends.is_stopped, LENGTH, STOP)
    return jnp.where(has_eos, with_eos, without_eos).astype(jnp.int32)
