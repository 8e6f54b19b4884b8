"""Records of the hidden states and attentions of every step.

A strategy creates `Records` from the output of prefill, and writes to them at every step; on the
host they become the tuples that transformers returns. Their buffers cover all steps, so they are
allocated only on request (`output_hidden_states`, `output_attentions`).
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
from jaxllm.models.outputs import DecodeOutput, PerLayer

MAX_RECORD_BYTES = 4 * 2**30
AnyArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Internals:
    """Hidden states and attentions of one forward pass, or with a leading axis of all steps.

    Each is a tuple over the layers, or None if it is not kept.
    """

    hidden_states: PerLayer = None
    """[B, T, D]; the embeddings come first."""
    attentions: PerLayer = None
    """[B, heads, T, S], over the slots of the cache."""
    cross_attentions: PerLayer = None
    """[B, heads, T, E], over the encoder's columns."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Records:
    """Hidden states and attentions of a whole generation."""

    prompt: Internals
    """Internals of the prompt's columns, once for all samples of a row."""
    steps: Internals
    """Internals of the newest token at every step after prefill."""
    encoder: Internals
    """Internals of the encoder; empty for decoder-only models and with `encoder_outputs`."""

    def write(self, out: DecodeOutput, step: Int[Array, ""]) -> Records:
        """Writes the output for new token `step`, 1 or more: prefill is step 0."""
        return self._put(self._internals_of(out), step)

    def write_branches(
        self,
        out: DecodeOutput,
        step: Int[Array, ""],
        columns: Int[Array, " S"] | Int[Array, "B S"],
    ) -> Records:
        """Writes the output for N branches of each row, as rows of the records: [B*N, 1, D] and
        [B*N, heads, 1, S].

        Args:
            columns: the column of each cache slot, one table for all rows or one per row. A branch
                attends to one slot of each column; the others have weight 0.
        """

        def rows(x: Array) -> Array:
            x = x if x.ndim == 3 else x.swapaxes(1, 2)  # [B, N, D], [B, N, heads, S]
            return x.reshape(-1, *x.shape[2:])[..., None, :]

        def by_column(weights: Array, buffer: Array) -> Array:
            column_of = columns
            if columns.ndim == 2:
                column_of = jnp.repeat(columns, weights.shape[0] // columns.shape[0], axis=0)
            empty = jnp.zeros((*weights.shape[1:-1], buffer.shape[-1]), weights.dtype)
            put = jax.vmap(
                lambda row, column: empty.at[..., column].add(row, mode="drop"),
                (0, 0 if columns.ndim == 2 else None),
            )
            return put(weights, column_of)

        new = jax.tree.map(rows, self._internals_of(out))
        weights = jax.tree.map(by_column, new.attentions, self.steps.attentions)
        return self._put(dataclasses.replace(new, attentions=weights), step)

    def write_columns(self, out: DecodeOutput, steps: Int[Array, " B"]) -> Records:
        """Writes the output for T new tokens of each row b, from new token `steps[b]` on."""

        def put(buffer: Array, new: Array) -> Array:
            new = jnp.moveaxis(new, -2, 0)[..., None, :]
            return jax.vmap(_put_step, in_axes=(1, 1, 0), out_axes=1)(buffer, new, steps - 1)

        return dataclasses.replace(
            self, steps=jax.tree.map(put, self.steps, self._internals_of(out))
        )

    def _internals_of(self, out: DecodeOutput) -> Internals:
        buffers = self.steps
        return internals(out, buffers.hidden_states is not None, buffers.attentions is not None)

    def _put(self, new: Internals, step: Int[Array, ""]) -> Records:
        steps = jax.tree.map(lambda b, x: _put_step(b, x[None], step - 1), self.steps, new)
        return dataclasses.replace(self, steps=steps)


def _put_step(buffer: Array, new: Array, step: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, new, step, axis=0)


def internals(out: DecodeOutput, hidden_states: bool, attentions: bool) -> Internals:
    """The requested parts of an output, which may hold more for the strategy's own use."""
    return Internals(
        hidden_states=out.hidden_states if hidden_states else None,
        attentions=out.attentions if attentions else None,
        cross_attentions=out.cross_attentions if attentions else None,
    )


def initial_records(
    out: DecodeOutput,
    samples: int,
    new_token_bucket: int,
    *,
    output_hidden_states: bool,
    output_attentions: bool,
    width: int | None = None,
) -> Records | None:
    """Records of the prompt, with empty buffers for the steps; None if nothing is kept.

    Args:
        out: the output of prefill.
        samples: results per row.
        new_token_bucket: the limit of new tokens, rounded up.
        output_hidden_states, output_attentions: whether they are kept.
        width: columns of the attention weights; None: as many as the cache has slots.
    """
    prompt = internals(out, output_hidden_states, output_attentions)
    if not jax.tree.leaves(prompt):
        return None

    def buffer(x: Array, last_axis: int) -> Array:
        heads = x.shape[1:-2]
        shape = (new_token_bucket - 1, x.shape[0] * samples, *heads, 1, last_axis)
        return jnp.zeros(shape, x.dtype)

    def buffers(layers: PerLayer, last_axis: int | None = None) -> PerLayer:
        if layers is None:
            return None
        return tuple(buffer(x, x.shape[-1] if last_axis is None else last_axis) for x in layers)

    steps = Internals(
        hidden_states=buffers(prompt.hidden_states),
        attentions=buffers(prompt.attentions, out.cache.capacity if width is None else width),
        cross_attentions=buffers(prompt.cross_attentions),
    )
    encoder = Internals(out.encoder_hidden_states, out.encoder_attentions)
    return Records(prompt=prompt, steps=steps, encoder=encoder)


def check_record_size(records: Records | None) -> None:
    """Raises InputError if records, arrays or shapes, take more than `MAX_RECORD_BYTES`."""
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(records))
    if size > MAX_RECORD_BYTES:
        raise InputError(
            f"output_attentions, output_hidden_states: their buffers would take {size:,} bytes, "
            f"more than {MAX_RECORD_BYTES:,}; ask for one of the two, for fewer new tokens or for "
            "fewer rows at a time"
        )


@dataclasses.dataclass(frozen=True)
class RecordColumns:
    """Maps columns of a result to columns of its records."""

    prompt_len: int
    """Columns of the prompt."""
    first_new: Int[np.ndarray, ""] | Int[np.ndarray, " B"]
    """The column of the first new token: beyond `prompt_len` if a negative prompt is longer; with
    `past_key_values` it follows the real tokens of each row."""
    encoder_len: int | None = None
    """Columns of the encoder's input; None for decoder-only models."""
    prompt_mask: Bool[np.ndarray, "B T"] | None = None
    """With `past_key_values`: the real columns of the prompt."""
    prefilled: int | None = None
    """With `past_key_values`: columns of prefill, in the row with the most."""

    @property
    def queries(self) -> int:
        """Number of query columns of the first step."""
        return self.prompt_len if self.prefilled is None else self.prefilled

    def cut_keys(self, weights: AnyArray, step: int) -> AnyArray:
        """Attention weights [B, heads, T, S] over the columns of the sequence up to new token
        `step`, without padding."""
        weights = weights[:, :, : self.queries]
        if self.prompt_mask is None:
            if self.first_new == self.prompt_len:
                return weights[..., : self.prompt_len + step]
            first = int(self.first_new)
            return weights[..., [*range(self.prompt_len), *range(first, first + step)]]
        # A continued cache holds the real tokens of each row without gaps.
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
        columns: maps columns of the result to columns of the records.
        steps: new tokens.
    """
    prompt, later, encoder = records.prompt, records.steps, records.encoder
    encoder_len = columns.encoder_len

    def tuples(
        first: PerLayer, rest: PerLayer, cut: Callable[[Any, int], Any]
    ) -> tuple[PerLayer, ...] | None:
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
