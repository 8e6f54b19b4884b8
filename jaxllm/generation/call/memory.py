"""Refuses calls whose buffers cannot fit, before anything is computed or compiled."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from jaxllm.common.errors import InputError
from jaxllm.common.hardware import default_device, format_bytes, nbytes, total_memory
from jaxllm.generation.call.layout import Layout
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.decoder import Decoder

MAX_SEQUENCES = 2**20
"""Most sequences of a call, results of all rows or beams of all rows."""
CHECKED_SLOTS = 2**14
CHECKED_LOGITS = 2**24
"""Sizes, in cache slots and logits of all sequences, above which the memory of a call is predicted
before it runs. Smaller ones fit wherever the model does, and are not delayed."""


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


def is_large(layout: Layout, vocab_size: int) -> bool:
    """True if the memory of a call is to be predicted."""
    sequences = layout.prefill_inputs.keys.shape[0]
    return sequences * layout.capacity > CHECKED_SLOTS or sequences * vocab_size > CHECKED_LOGITS


def check_memory(model: Decoder, layout: Layout, mesh: Mesh | None, state: object) -> None:
    """Raises InputError if weights and decoding state need more memory than the devices have.

    Not for a model without weights: it is planned for other devices than this machine's.

    Args:
        mesh: of the model; None: it is on one device.
        state: shapes of the decoding state.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model)):
        return
    devices = [default_device()] if mesh is None else mesh.local_devices
    needed, memory = nbytes(model) + nbytes(state), total_memory(devices) * jax.process_count()
    if needed > memory:
        sequences, slots = layout.prefill_inputs.keys.shape[0], layout.capacity
        raise InputError(
            f"a KV cache of {slots} slots (for each of {sequences} sequences) and the weights need "
            f"{format_bytes(needed)}, but there are {format_bytes(memory)} of memory: lower "
            "num_return_sequences, num_beams, max_new_tokens, max_cache_len or the number of "
            "prompts"
        )
