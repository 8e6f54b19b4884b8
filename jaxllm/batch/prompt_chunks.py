"""Prompts that are prefilled in chunks, several rows at once, and the compiled programs for that.

A prompt is staged: it gets a row of a KV cache beside the slots, in which its chunks follow each
other while the slots decode. After the last chunk its first token is chosen, and the row is copied
into a slot. `Sizes` has the two widths of chunks. A narrow chunk is a part of each of several
prompts, a wide chunk a part of one, or of several where devices share the rows. Where a prompt is
cut depends on its own columns alone, so the other rows of a program change nothing about its sums.
Beams, the prompts of encoder-decoders, and RoPE that depends on the length need whole prompts.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxllm.batch.row_groups import Task
from jaxllm.batch.slots import PromptRows, Sizes, Slots, with_shardings, write_rows
from jaxllm.cache.kv_cache import Cache, per_head
from jaxllm.cache.slot_cache import SlotCache
from jaxllm.models.decoder import Decoder, FlatModel
from jaxllm.models.outputs import DecodeOutput
from jaxllm.nn.platform.decoding import chunk_size, narrow_chunk_size
from jaxllm.parallel.field_axes import Axes, constrain_fields, map_with_axes
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import use_mesh

T = TypeVar("T")
C = TypeVar("C", bound=Cache)


def with_chunks(sizes: Sizes, platform: str, chunk_size: int) -> Sizes:
    """The sizes with the widths of chunks. A wide chunk has up to `chunk_size` columns."""
    wide = min(chunk_size, sizes.columns)
    narrow = min(wide, narrow_chunk_size(platform))
    return dataclasses.replace(sizes, wide=wide, narrow=narrow)


def with_chunks_of_a_job(sizes: Sizes, model: Decoder) -> Sizes:
    """The sizes with the widths of chunks that suit the model's devices; the same sizes if prompts
    are prefilled as a whole."""
    if sizes.beams > 1 or why_whole(model) is not None:
        return sizes
    platform = platform_of_arrays(model)
    return with_chunks(sizes, platform, chunk_size(platform))


def why_whole(model: Decoder) -> str | None:
    """Why the model's prompts are prefilled as a whole; None: they need not be."""
    if model.is_encoder_decoder:
        return "an encoder-decoder, whose prompt is the encoder's"
    rope = getattr(model.config, "rotary", None)
    if rope is not None and rope.uses_length:
        return "RoPE that depends on the length of the prompt"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StagedRows:
    """The rows of prompts that are prefilled in chunks, on the device."""

    cache: SlotCache
    """Column j of a prompt is in cache slot j."""
    logits: Float[Array, "R V"]
    """Logits of the last column of each prompt's newest chunk."""


@dataclasses.dataclass(eq=False)
class StagedPrompt:
    """A task whose prompt is prefilled in chunks."""

    task: Task
    length: int
    """Columns of the prompt that its row has."""

    @property
    def is_complete(self) -> bool:
        return self.length == len(self.task.row.input_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptColumns:
    """The next columns of some prompts, as host arrays; rows without new columns fill it up."""

    tokens: Int[Array, "N T"]
    lengths: Int[Array, " N"]
    """New columns of each row, at most T."""
    starts: Int[Array, " N"]
    """Columns that each row has already; start + T is at most the cache's capacity."""
    rows: Int[Array, " N"]
    """Number of each row in `StagedRows`."""

    @classmethod
    def empty(cls, rows: int, columns: int) -> PromptColumns:
        """A chunk without new columns."""
        tokens: Any = np.zeros((rows, columns), np.int32)
        numbers: list[Any] = [np.zeros(rows, np.int32) for _ in range(3)]
        return cls(tokens, *numbers)

    @classmethod
    def next_of(cls, prompts: dict[int, StagedPrompt], sizes: Sizes) -> PromptColumns:
        """The next chunk of the first prompt that is not complete, with the chunks of the other
        prompts that have the same width if it has several rows.

        Args:
            prompts: by the number of the row; one of them is not complete.
        """

        def width(prompt: StagedPrompt) -> int:
            return sizes.chunk_width(prompt.length, len(prompt.task.row.input_ids))

        first = next(row for row, prompt in prompts.items() if not prompt.is_complete)
        columns = width(prompts[first])
        rows = [first] if sizes.chunk_rows(columns) == 1 else range(sizes.prefill_rows)
        chunk: Any = cls.empty(len(rows), columns)
        for i, row in enumerate(rows):
            chunk.rows[i], prompt = row, prompts.get(row)
            if prompt is None:
                continue
            chunk.starts[i] = prompt.length
            if not prompt.is_complete and width(prompt) == columns:
                part = prompt.task.row.input_ids[prompt.length :][:columns]
                chunk.tokens[i, : len(part)], chunk.lengths[i] = part, len(part)
        return chunk


def staged_shapes(model: Decoder, sizes: Sizes, mesh: Mesh | AbstractMesh | None) -> StagedRows:
    """Shapes, dtypes and shardings of staged rows."""
    count = sizes.prefill_rows

    def empty(model: Decoder) -> StagedRows:
        cache = SlotCache.of(model.init_cache(count, sizes.capacity))
        return StagedRows(cache, jnp.zeros((count, model.config.vocab_size), jnp.float32))

    with use_mesh(mesh):
        shapes = jax.eval_shape(empty, model)
    return with_shardings(shapes, mesh, count)


def take_rows(tree: T, count: int, rows: Int[Array, " N"]) -> T:
    """Some of the `count` rows of a tree."""

    def take(axes: Axes, x: Array) -> Array:
        if "rows" not in axes or not x.ndim:
            return x
        by_row = x.reshape(count, x.shape[0] // count, *x.shape[1:])
        return by_row[rows].reshape(-1, *x.shape[1:])

    return map_with_axes(take, tree)


def zero_masked(cache: C) -> C:
    """The cache with keys and values of 0 where its mask is False, since a NaN there would pass the
    mask (0 * NaN is NaN)."""

    def zeroed(x: Array) -> Array:
        return jnp.where(per_head(cache.mask, x)[..., None], x, 0)

    return cache.replace(layers=jax.tree.map(zeroed, cache.layers))


def without_old_columns(cache: C, is_new: Bool[Array, " N"]) -> C:
    """The cache with keys and values of 0 in the rows of new prompts, in which an earlier prompt
    may have left a NaN."""

    def zeroed(x: Array) -> Array:
        return jnp.where(per_head(is_new, x)[..., None, None], 0, x)

    # The rows of a prompt that goes on are not read for this.
    layers = jax.lax.cond(
        jnp.any(is_new), lambda layers: jax.tree.map(zeroed, layers), lambda x: x, cache.layers
    )
    return cache.replace(layers=layers)


@partial(jax.jit, donate_argnames=("staged",))
def prefill_chunk(model: FlatModel, staged: StagedRows, chunk: PromptColumns) -> StagedRows:
    """Prefills the next columns of staged prompts."""
    count, lengths = len(staged.logits), jnp.asarray(chunk.lengths)
    all_rows = len(chunk.rows) == count
    old = staged if all_rows else take_rows(staged, count, chunk.rows)
    cache = old.cache.truncate(jnp.asarray(chunk.starts))
    cache = without_old_columns(cache, (cache.length == 0) & (lengths > 0))
    mask = jnp.arange(chunk.tokens.shape[1])[None] < lengths[:, None]
    last = jnp.maximum(lengths - 1, 0)
    out = model.model().decode(jnp.asarray(chunk.tokens), mask, cache, logits_column=last)
    logits = jnp.where((lengths > 0)[:, None], out.logits[:, 0], old.logits)
    new = StagedRows(SlotCache.of(out.cache), logits)
    return constrain_fields(new if all_rows else write_rows(staged, new, chunk.rows), batch=count)


# The staged rows are not donated: other prompts go on in them.
@partial(jax.jit, static_argnames=("new_token_bucket",), donate_argnames=("slots",))
def start_rows(
    model: FlatModel,
    slots: Slots,
    staged: StagedRows,
    rows: PromptRows,
    slot_ids: Int[Array, " R"],
    *,
    new_token_bucket: int,
) -> Slots:
    """Chooses the first tokens of prompts that are prefilled, and copies their rows into slots.

    Args:
        rows: the prompts of all staged rows, padded to the columns of a slot.
        slot_ids: the slot of each row; for other rows the number of slots, which is no slot.
    """
    rows = constrain_fields(rows, batch=len(slot_ids))
    inputs = rows.inputs_with_keys()
    cache = zero_masked(staged.cache.truncate(jnp.asarray(inputs.cache_len)))
    logits = staged.logits[:, None]
    out = DecodeOutput(
        logits=logits,
        cache=slots.state.cache.rows_of(cache),
        last_hidden_state=jnp.zeros_like(logits[..., :0]),  # no strategy of slots reads it
    )
    state = rows.strategy.init(model.model(), inputs, out, rows.settings, new_token_bucket)
    return write_rows(slots, Slots.of(rows, state), slot_ids)


@partial(jax.jit, donate_argnames=("staged",))
def write_prefix(
    staged: StagedRows, prefix: Cache, length: Int[Array, " 1"], rows: Int[Array, " 1"]
) -> StagedRows:
    """Copies the first `length` columns of a kept prefix into a staged row."""
    cache = write_rows(staged.cache, zero_masked(prefix.truncate(length)), rows)
    return constrain_fields(dataclasses.replace(staged, cache=cache), batch=len(staged.logits))


@jax.jit
def copy_prompt(staged: StagedRows, rows: Int[Array, " 1"]) -> SlotCache:
    """A copy of a staged row, for a kept prefix."""
    return constrain_fields(take_rows(staged.cache, len(staged.logits), rows), batch=1)
