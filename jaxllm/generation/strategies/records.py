"""What the model computes beside logits, kept for the user: hidden states and attentions.

A strategy makes `Records` from what was read of the prompt, and writes into them at every step; on
the host they are cut into the tuples that transformers returns. Their buffers have room for every
step, so they are made only where they are asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import is_traced
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
        return self._put(self._of(read), step)

    def write_branches(
        self,
        read: DecodeOutput,
        step: Int[Array, ""],
        columns: Int[Array, " S"] | Int[Array, "B S"],
    ) -> Records:
        """As `write`, of branches, each of which is a row here: [B*N, 1, D], [B*N, heads, 1, S].

        `columns` says which column each slot of the cache belongs to, of all rows or of each. A
        branch sees one slot of each, and no other has any weight.
        """

        def rows(x):
            x = x if x.ndim == 3 else x.swapaxes(1, 2)  # [B, N, D], [B, N, heads, S]
            return x.reshape(-1, *x.shape[2:])[..., None, :]

        def by_column(weights, kept):
            each = columns
            if columns.ndim == 2:
                each = jnp.repeat(columns, weights.shape[0] // columns.shape[0], axis=0)
            empty = jnp.zeros((*weights.shape[1:-1], kept.shape[-1]), weights.dtype)
            put = jax.vmap(
                lambda row, at: empty.at[..., at].add(row, mode="drop"),
                (0, 0 if each.ndim == 2 else None),
            )
            return put(weights, each)

        new = jax.tree.map(rows, self._of(read))
        weights = jax.tree.map(by_column, new.attentions, self.steps.attentions)
        return self._put(dataclasses.replace(new, attentions=weights), step)

    def write_columns(self, read: DecodeOutput, steps: Int[Array, " B"]) -> Records:
        """As `write`, of T columns, which each row reads for its new tokens from `steps[b]` on."""

        def put(kept, new):
            new = jnp.moveaxis(new, -2, 0)[..., None, :]
            return jax.vmap(_put_at, in_axes=(1, 1, 0), out_axes=1)(kept, new, steps - 1)

        return dataclasses.replace(self, steps=jax.tree.map(put, self.steps, self._of(read)))

    def _of(self, read: DecodeOutput) -> Internals:
        kept = self.steps
        return internals(read, kept.hidden_states is not None, kept.attentions is not None)

    def _put(self, new: Internals, step: Int[Array, ""]) -> Records:
        written = jax.tree.map(lambda kept, x: _put_at(kept, x[None], step - 1), self.steps, new)
        return dataclasses.replace(self, steps=written)


def _put_at(kept: Array, new: Array, at: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(kept, new, at, axis=0)


def internals(read: DecodeOutput, hidden_states: bool, attentions: bool) -> Internals:
    """What is kept of a call; a strategy may have asked for more than that."""
    return Internals(
        hidden_states=read.hidden_states if hidden_states else None,
        attentions=read.attentions if attentions else None,
        cross_attentions=read.cross_attentions if attentions else None,
    )


def first_records(
    read: DecodeOutput,
    samples: int,
    room: int,
    *,
    output_hidden_states: bool,
    output_attentions: bool,
    width: int | None = None,
) -> Records | None:
    """Records that hold the prompt's part, with buffers for `room` tokens; None if nothing is kept.

    Args:
        read: what the model read of the prompt.
        samples: results a row.
        room: most new tokens.
        output_hidden_states, output_attentions: what is kept.
        width: most columns that attention looks at; None: as many as the cache has slots.
    """
    prompt = internals(read, output_hidden_states, output_attentions)
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
        attentions=zeros(prompt.attentions, read.cache.capacity if width is None else width),
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


@dataclasses.dataclass(frozen=True)
class RecordColumns:
    """Where the columns of a result are in its records."""

    prompt_len: int
    """Columns of the prompt."""
    first_new: Int[np.ndarray, ""] | Int[np.ndarray, " B"]
    """The column of the first new token: beyond `prompt_len` if a negative prompt is longer; with
    `past_key_values` after the real tokens of each row."""
    encoder_len: int | None = None
    """Columns of the encoder's input; None for decoder-only models."""
    prompt_mask: Bool[np.ndarray, "B T"] | None = None
    """With `past_key_values`: the real columns of the prompt."""
    prefilled: int | None = None
    """With `past_key_values`: columns that prefill ran, in the row with the most."""

    @property
    def queries(self) -> int:
        """Columns of the first step."""
        return self.prompt_len if self.prefilled is None else self.prefilled

    def cut_keys(self, weights: Any, step: int) -> Any:
        """Attention weights [B, heads, T, S] over the columns of the sequence up to new token
        `step`, without padding."""
        weights = weights[:, :, : self.queries]
        if self.prompt_mask is None:
            if self.first_new == self.prompt_len:
                return weights[..., : self.prompt_len + step]
            first = int(self.first_new)
            return weights[..., [*range(self.prompt_len), *range(first, first + step)]]
        # A cache that continues holds the real tokens of each row, without gaps.
        old = np.maximum(np.cumsum(self.prompt_mask, axis=1) - 1, 0)
        new = self.first_new[:, None] + np.arange(step)
        slots = np.concatenate([old, new], axis=1)
        real = np.concatenate([self.prompt_mask, np.ones(new.shape, bool)], axis=1)
        samples = len(weights) // len(slots)
        slots, real = np.repeat(slots, samples, axis=0), np.repeat(real, samples, axis=0)
        weights = np.take_along_axis(np.asarray(weights), slots[:, None, None], axis=-1)
        return np.where(real[:, None, None], weights, 0)


def as_tuples(records: Records, columns: RecordColumns, *, steps: int) -> dict[str, Any]:
    """The fields of `GenerateOutput`: tuples over steps of tuples over layers, without padding.

    Args:
        columns: where the columns of the result are in the records.
        steps: new tokens.
    """
    prompt, later, encoder = records.prompt, records.steps, records.encoder
    encoder_len = columns.encoder_len

    def tuples(
        first: Layers, rest: Layers, cut: Callable[[Any, int], Any]
    ) -> tuple[Layers, ...] | None:
        if first is None or rest is None:
            return None
        host = jnp if is_traced(first[0]) else np
        samples = rest[0].shape[1] // first[0].shape[0]
        prompt_step = tuple(cut(host.repeat(x, samples, axis=0), 0) for x in first)
        return (prompt_step, *(tuple(cut(x[i], i + 1) for x in rest) for i in range(steps - 1)))

    fields: dict[str, Any] = {
        "hidden_states": tuples(
            prompt.hidden_states, later.hidden_states, lambda x, step: x[:, : columns.queries]
        ),
        "attentions": tuples(prompt.attentions, later.attentions, columns.cut_keys),
        "cross_attentions": tuples(
            prompt.cross_attentions,
            later.cross_attentions,
            lambda x, step: x[:, :, : columns.queries, :encoder_len],
        ),
    }
    if encoder_len is None:
        return fields
    for name in ("hidden_states", "attentions"):
        fields[f"decoder_{name}"] = fields.pop(name)
    if encoder.hidden_states is not None:
        fields["encoder_hidden_states"] = tuple(x[:, :encoder_len] for x in encoder.hidden_states)
    if encoder.attentions is not None:
        fields["encoder_attentions"] = tuple(
            x[:, :, :encoder_len, :encoder_len] for x in encoder.attentions
        )
    return fields
