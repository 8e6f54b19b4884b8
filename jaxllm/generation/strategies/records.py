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
class Places:
    """Where the columns of a result are among those that were recorded."""

    prompt: int
    """Columns of the prompt."""
    first_new: Int[np.ndarray, ""] | Int[np.ndarray, " B"]
    """Where new tokens begin: beyond `prompt` if a negative prompt is longer; with
    `past_key_values` behind the real tokens of each row."""
    source: int | None = None
    """Columns of the encoder's input; None for decoder-only models."""
    held: Bool[np.ndarray, "B C"] | None = None
    """The real columns of a prompt of which a part was in `past_key_values`."""
    read: int | None = None
    """Of such a prompt the columns that were read, of the row with the most."""

    @property
    def queries(self) -> int:
        """Columns of the first entry."""
        return self.prompt if self.read is None else self.read

    def keys(self, x: Any, step: int) -> Any:
        """Attention over the columns of the text up to new token `step`."""
        x = x[:, :, : self.queries]
        if self.held is None:
            if self.first_new == self.prompt:
                return x[..., : self.prompt + step]
            first = int(self.first_new)
            return x[..., [*range(self.prompt), *range(first, first + step)]]
        # A cache that goes on holds the real tokens of each row, without gaps.
        old = np.maximum(np.cumsum(self.held, axis=1) - 1, 0)
        new = self.first_new[:, None] + np.arange(step)
        slots = np.concatenate([old, new], axis=1)
        real = np.concatenate([self.held, np.ones(new.shape, bool)], axis=1)
        slots, real = (np.repeat(part, len(x) // len(part), axis=0) for part in (slots, real))
        weights = np.take_along_axis(np.asarray(x), slots[:, None, None], axis=-1)
        return np.where(real[:, None, None], weights, 0)


def as_tuples(records: Records, columns: Places, *, steps: int) -> dict[str, Any]:
    """The fields of `GenerateOutput`: tuples over steps of tuples over layers, without padding.

    Args:
        columns: where those of the result are.
        steps: new tokens.
    """
    prompt, later, encoder = records.prompt, records.steps, records.encoder
    source = columns.source

    def tuples(first: Layers, rest: Layers, cut) -> tuple[Layers, ...] | None:
        if first is None or rest is None:
            return None
        host = jnp if is_traced(first[0]) else np
        times = rest[0].shape[1] // first[0].shape[0]
        head = tuple(cut(host.repeat(x, times, axis=0), 0) for x in first)
        return (head, *(tuple(cut(x[i], i + 1) for x in rest) for i in range(steps - 1)))

    found: dict[str, Any] = {
        "hidden_states": tuples(
            prompt.hidden_states, later.hidden_states, lambda x, step: x[:, : columns.queries]
        ),
        "attentions": tuples(prompt.attentions, later.attentions, columns.keys),
        "cross_attentions": tuples(
            prompt.cross_attentions,
            later.cross_attentions,
            lambda x, step: x[:, :, : columns.queries, :source],
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
