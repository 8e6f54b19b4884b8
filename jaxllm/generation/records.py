"""What the model computes beside logits, kept for the user: hidden states and attentions.

A strategy makes `Records` from what was read of the prompt, and writes into them at every step; on
the host they are cut into the tuples that transformers returns. Their buffers have room for every
step, so they are made only where they are asked for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.errors import InputError
from jaxllm.generation.values import is_traced
from jaxllm.models.outputs import DecodeOutput, Layers

MOST_BYTES = 4 * 2**30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Internals:
    """One entry a layer; hidden states have one more, the embeddings.

    Shapes are [B, T, D], [B, N, T, S] and [B, N, T, E]; of all steps together, with the steps in
    front.
    """

    hidden_states: Layers = None
    attentions: Layers = None
    cross_attentions: Layers = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Records:
    prompt: Internals
    """Of the prompt's columns, once for all samples of a row."""
    steps: Internals
    """Of the newest token at every step but the first, which read the prompt."""
    encoder: Internals
    """Empty for decoder-only models, and where the caller gave the encoder's output."""

    def write(self, read: DecodeOutput, step: Int[Array, ""]) -> Records:
        """With what was read for new token `step`, counted from 0; 1 is the first one written."""

        def put(kept, new):
            return jax.lax.dynamic_update_slice_in_dim(kept, new[None], step - 1, axis=0)

        kept = self.steps
        new = internals(read, kept.hidden_states is not None, kept.attentions is not None)
        return dataclasses.replace(self, steps=jax.tree.map(put, kept, new))


def internals(read: DecodeOutput, hidden_states: bool, attentions: bool) -> Internals:
    """What is kept of a call; a strategy may have asked for more than that."""
    return Internals(
        hidden_states=read.hidden_states if hidden_states else None,
        attentions=read.attentions if attentions else None,
        cross_attentions=read.cross_attentions if attentions else None,
    )


def first_records(
    read: DecodeOutput, samples: int, room: int, *, hidden_states: bool, attentions: bool
) -> Records | None:
    """Records that hold the prompt's part, with buffers for `room` tokens; None if nothing is kept.

    Args:
        read: what the model read of the prompt.
        samples: results a row.
        room: most new tokens.
        hidden_states, attentions: what is kept.
    """
    prompt = internals(read, hidden_states, attentions)
    if not jax.tree.leaves(prompt):
        return None

    def zeros(layers: Layers, last: int | None = None) -> Layers:
        if layers is None:
            return None

        def like(x):
            rows, (*heads, _, width) = x.shape[0] * samples, x.shape[1:]
            shape = (room - 1, rows, *heads, 1, width if last is None else last)
            return jnp.zeros(shape, x.dtype)

        return tuple(like(x) for x in layers)

    steps = Internals(
        hidden_states=zeros(prompt.hidden_states),
        attentions=zeros(prompt.attentions, read.cache.capacity),
        cross_attentions=zeros(prompt.cross_attentions),
    )
    encoder = Internals(read.encoder_hidden_states, read.encoder_attentions)
    return Records(prompt=prompt, steps=steps, encoder=encoder)


def check_size(records: Records | None) -> None:
    """Raises if the records, of which only the shapes need be known, would be huge."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(records))
    if size > MOST_BYTES:
        raise InputError(
            f"output_attentions, output_hidden_states: their buffers would take {size:,} bytes, "
            f"more than {MOST_BYTES:,}; ask for one of the two, for fewer new tokens or for fewer "
            "rows at a time"
        )


def as_tuples(records: Records, *, columns: int, source: int | None, steps: int) -> dict[str, Any]:
    """The fields of `GenerateOutput`: tuples over steps of tuples over layers, without padding.

    Args:
        columns: of the prompt.
        source: columns of the encoder's input; None for decoder-only models.
        steps: new tokens.
    """
    prompt, later, encoder = records.prompt, records.steps, records.encoder

    def tuples(first: Layers, rest: Layers, cut) -> tuple[Layers, ...] | None:
        if first is None or rest is None:
            return None
        host = jnp if is_traced(first[0]) else np
        times = rest[0].shape[1] // first[0].shape[0]
        head = tuple(cut(host.repeat(x, times, axis=0), 0) for x in first)
        return (head, *(tuple(cut(x[i], i + 1) for x in rest) for i in range(steps - 1)))

    found: dict[str, Any] = {
        "hidden_states": tuples(
            prompt.hidden_states, later.hidden_states, lambda x, step: x[:, :columns]
        ),
        "attentions": tuples(
            prompt.attentions,
            later.attentions,
            lambda x, step: x[:, :, :columns, : columns + step],
        ),
        "cross_attentions": tuples(
            prompt.cross_attentions,
            later.cross_attentions,
            lambda x, step: x[:, :, :columns, :source],
        ),
    }
    if source is None:
        return found
    for name in ("hidden_states", "attentions"):
        found[f"decoder_{name}"] = found.pop(name)
    if encoder.hidden_states is not None:
        found["encoder_hidden_states"] = tuple(x[:, :source] for x in encoder.hidden_states)
    if encoder.attentions is not None:
        found["encoder_attentions"] = tuple(x[:, :, :source, :source] for x in encoder.attentions)
    return found
