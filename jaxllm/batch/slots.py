"""Batch slots, the rows that are written into them, and the compiled programs over them.

A row starts at position 0 of its slot, without left padding, and has its own length, random key and
settings, so its result does not depend on other rows. The first axis of every array is slots; in
the KV cache, slots and heads share one axis unless a mesh shards heads. On a mesh the first axis is
sharded over `data` and `fsdp`, the heads of the cache over `tensor`.

A prompt is prefilled as a whole, or in chunks (prompt_chunks.py) and then copied into a slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int, Shaped

from jaxllm.cache.slot_cache import RotatedCache, SlotCache
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.loop import decode_loop, first_state, without_ended_rows
from jaxllm.generation.strategies.draws import keys_of_slots
from jaxllm.generation.strategies.strategy import (
    RUNNING,
    STOP,
    AnyStrategy,
    DecodeSettings,
    PrefillInputs,
    Result,
)
from jaxllm.models.decoder import Decoder, FlatModel
from jaxllm.nn.platform.decoding import steps_between_checks, writes_one_slot
from jaxllm.parallel.field_axes import Axes, constrain_fields, field_shardings, map_with_axes
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import ROWS, context_mesh, partition_spec, use_mesh

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that determine the shapes of a pool's programs."""

    slots: int
    columns: int
    """Columns of a sequence, its prompt included."""
    encoder_columns: int | None = None
    """Columns of the encoder's input, of an encoder-decoder."""
    shards: int = 1
    """Number of shards of the slot axis on a mesh; divides `slots`."""
    beams: int = 1
    """Sequences that a slot decodes."""
    new_token_bucket: int = 0
    """Most new tokens, rounded up, where there are several beams; else 0."""
    wide: int = 0
    """Columns of a wide chunk of a prompt; 0: prompts are prefilled as a whole. The widths are
    powers of two."""
    narrow: int = 0
    """Columns of a narrow chunk."""

    @property
    def capacity(self) -> int:
        """KV-cache positions of a slot: the prompt once, new tokens once for each beam.

        >>> Sizes(16, 64).capacity, Sizes(16, 64, beams=4, new_token_bucket=32).capacity
        (64, 160)
        """
        return self.columns + (self.beams - 1) * self.new_token_bucket

    @property
    def prefill_rows(self) -> int:
        """Prompts of one prefill: a sixteenth of the slots. Decoding stops when as many slots are
        free, so that less than a sixteenth of them wait on average. A multiple of `shards` where
        there are enough."""
        count = max(1, self.slots // 16)
        return count - count % self.shards or count

    def chunk_width(self, start: int, length: int) -> int:
        """Columns of the chunk that follows the first `start` columns of a prompt of `length`: a
        wide one if more than half of it is filled.

        >>> sizes = Sizes(16, 1024, wide=128, narrow=32)
        >>> [sizes.chunk_width(start, 300) for start in (0, 32, 128, 256)]
        [128, 32, 128, 32]
        """
        is_wide = start % self.wide == 0 and length - start > self.wide // 2
        return self.wide if is_wide else self.narrow

    def chunk_widths(self, length: int, start: int = 0) -> Iterator[int]:
        """Columns of each chunk of a prompt of `length` after its first `start` columns."""
        while start < length:
            yield (width := self.chunk_width(start, length))
            start += width

    def prefix_columns(self, shared: int, length: int) -> int:
        """Columns to take from a kept prefix that shares `shared` columns with a prompt of
        `length`: a whole number of narrow chunks, or of wide ones if the rest is prefilled sooner
        after these. A narrow chunk counts as half a wide one.

        >>> sizes = Sizes(16, 1024, wide=512, narrow=64)
        >>> [sizes.prefix_columns(100, length) for length in (160, 500)]
        [64, 0]
        """

        def cost(start: int) -> int:
            return sum(1 + (width == self.wide) for width in self.chunk_widths(length, start))

        return min(shared - shared % self.narrow, shared - shared % self.wide, key=cost)

    def chunk_rows(self, width: int) -> int:
        """Rows of a chunk: all in which prompts are prefilled, or one for a wide chunk, unless
        devices share the rows.

        >>> sizes = Sizes(64, 1024, wide=512, narrow=64)
        >>> [sizes.chunk_rows(512), sizes.chunk_rows(64)]
        [1, 4]
        >>> dataclasses.replace(sizes, shards=4).chunk_rows(512)
        4
        """
        return 1 if width > self.narrow and self.shards == 1 else self.prefill_rows

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """The shapes of chunks, each as rows and columns, the widest first."""
        widths = dict.fromkeys((self.wide, self.narrow))
        return [(self.chunk_rows(width), width) for width in widths]

    def with_slots(self, slots: int) -> Sizes:
        """The same with another number of slots, rounded up to a multiple of `shards`."""
        return dataclasses.replace(self, slots=-(-slots // self.shards) * self.shards)

    def max_new_tokens(self, prompt_length: int) -> int:
        """Most new tokens after a prompt."""
        columns = self.columns - prompt_length
        return columns if self.beams == 1 else min(columns, self.new_token_bucket)

    def with_half_the_new_tokens(self, prompt_length: int) -> Sizes | None:
        """The next smaller slots, of about half as many new tokens after a prompt; None if there
        are none.

        >>> sizes = Sizes(1, 64, beams=4, new_token_bucket=64).with_half_the_new_tokens(3)
        >>> sizes.columns, sizes.new_token_bucket, sizes.with_half_the_new_tokens(3).columns
        (64, 32, 32)
        """
        half_columns, half_new_tokens = (
            size // 2 if size > SMALLEST_BUCKET else 0
            for size in (self.columns, self.new_token_bucket)
        )
        max_new_tokens = max(half_columns - prompt_length, half_new_tokens)
        if max_new_tokens < 1:
            return None
        columns = bucket(prompt_length + max_new_tokens, SMALLEST_BUCKET)
        new_token_bucket = 0 if self.beams == 1 else bucket(max_new_tokens, SMALLEST_BUCKET)
        return dataclasses.replace(
            self,
            columns=columns,
            new_token_bucket=new_token_bucket,
            wide=min(self.wide, columns),
            narrow=min(self.narrow, columns),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptRows:
    """R prompts to prefill and write into slots.

    Arrays are on the host and have a row axis, but for the tables of stop strings, which are on the
    devices and shared by all rows of a program.
    """

    strategy: AnyStrategy
    settings: DecodeSettings
    inputs: PrefillInputs
    """Without left padding. The programs make the random keys."""

    def inputs_with_keys(self) -> PrefillInputs:
        """The inputs as strategies take them."""
        return dataclasses.replace(self.inputs, keys=keys_of_slots(self.inputs.keys))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """All slots on the device, each with the settings of its row; `prefill_slots` and
    `decode_slots` update them in place.

    A free slot keeps the state of the row that ended there, or none.
    """

    strategy: AnyStrategy
    settings: DecodeSettings
    state: Any
    """The strategy's state, one row for each slot. Random keys are stored as raw key data."""

    @classmethod
    def of(cls, rows: PromptRows, state: Any) -> Self:
        """The rows in a state of their strategy; the cache of rows that have ended gets a length of
        0."""
        return cls(rows.strategy, rows.settings, None).with_state(without_ended_rows(state))

    def with_state(self, state: Any) -> Self:
        """The slots in another state of their strategy."""
        state = state.replace(keys=jax.random.key_data(state.keys))
        return dataclasses.replace(self, state=state)

    @property
    def strategy_state(self) -> Any:
        """The state as the strategy has it, with random keys."""
        return self.state.replace(keys=jax.random.wrap_key_data(self.state.keys))

    @property
    def count(self) -> int:
        return self.state.reason.shape[0]


def with_shardings(shapes: T, mesh: Mesh | AbstractMesh | None, count: int) -> T:
    """Shapes of `count` slots with their shardings."""
    if mesh is None:
        # Not weakly typed: programs are compiled for the arrays that `empty_slots` makes of these.
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    replicated = NamedSharding(mesh, PartitionSpec())

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        if 0 in x.shape:  # programs return empty arrays replicated
            sharding = replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, shapes, field_shardings(shapes, mesh, batch=count))


def place(x: np.ndarray, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
    """Copies an array to the devices; by default to the default device."""
    return jax.device_put(x, sharding, may_alias=False)


def scatter_rows(
    old: Shaped[Array, "B ..."],
    new: Shaped[Array, "R ..."],
    slot_ids: Int[Array, " R"],
    axes: tuple[str, ...] = ("rows",),
) -> Shaped[Array, "B ..."]:
    """Replaces rows `slot_ids` of `old` in place.

    Row numbers beyond the last row are dropped. On a mesh each device writes the rows of its shard:
    only the new rows are communicated.

    Args:
        axes: the logical axes of the first dimensions of `old`.
    """

    def scatter(old: Array, new: Array, slot_ids: Array) -> Array:
        return old.at[slot_ids].set(new, mode="drop")

    mesh = context_mesh()
    spec = None if mesh is None else partition_spec(old.shape, axes, mesh)
    if spec is None or spec[0] is None:  # every device has all rows
        return scatter(old, new, slot_ids)

    def scatter_shard(old: Array, new: Array, slot_ids: Array) -> Array:
        in_shard = slot_ids - jax.lax.axis_index(ROWS) * old.shape[0]
        return scatter(old, new, jnp.where(in_shard < 0, old.shape[0], in_shard))

    in_specs = (spec, PartitionSpec(None, *spec[1:]), PartitionSpec())
    return jax.shard_map(scatter_shard, in_specs=in_specs, out_specs=spec)(old, new, slot_ids)


def write_rows(old: T, new: T, slot_ids: Int[Array, " R"]) -> T:
    """Writes new rows into the slots `slot_ids`; one beyond the last slot is left out.

    Other axes of the new rows may be shorter than those of the slots; the rest is zero-filled.
    Masked keys and values are zeroed as well, since a NaN left there by the previous row would pass
    the mask (0 * NaN is NaN).
    """

    def write(
        axes: Axes,
        old: Shaped[Array, "B ..."] | Shaped[Array, ""],
        new: Shaped[Array, "R ..."] | Shaped[Array, ""],
    ):
        if "rows" not in axes or old.ndim == 0:  # the same for all slots
            return old
        ids, own_axes = slot_ids, ("rows",)
        if "heads" in axes and old.ndim == 4:
            own_axes = ("rows", "heads")
        elif "heads" in axes:  # they share the first axis with rows
            heads = new.shape[0] // slot_ids.shape[0]
            ids = (slot_ids[:, None] * heads + jnp.arange(heads)[None]).reshape(-1)
        pads = [(0, size - rest) for size, rest in zip(old.shape[1:], new.shape[1:], strict=True)]
        padded = jnp.pad(jnp.asarray(new, old.dtype), [(0, 0), *pads])
        return scatter_rows(old, padded, ids, own_axes)

    return map_with_axes(write, old, new)


class DecodeProgress(NamedTuple):
    """Results of some decode steps, for the host."""

    result: Result
    """Of all slots, whether their rows have ended or not."""
    unfinished: Bool[Array, " B"]
    """True while the slot's row is not finished."""
    steps: Int[Array, ""]
    """Decode steps of this call."""
    busy_slot_steps: Int[Array, ""]
    """Slot-steps occupied by an unfinished row."""


def slot_shapes(
    model: Decoder, rows: PromptRows, sizes: Sizes, mesh: Mesh | AbstractMesh | None = None
) -> Slots:
    """The shapes, dtypes and shardings of slots.

    Args:
        rows: any rows of the group.
    """
    count = sizes.slots

    def repeated(axes: Axes, x: Array | np.ndarray) -> jax.ShapeDtypeStruct:
        has_rows = "rows" in axes and x.ndim
        return jax.ShapeDtypeStruct((count, *x.shape[1:]) if has_rows else x.shape, x.dtype)

    one_slot = sizes.beams == 1 and writes_one_slot(platform_of_arrays(model))
    kind = RotatedCache if one_slot else SlotCache

    def initial_slots(model: Decoder, rows: PromptRows) -> Slots:
        encoder = {}
        if sizes.encoder_columns is not None:
            shape = (count, sizes.encoder_columns)
            encoder = {"input_ids": jnp.zeros(shape, jnp.int32)}
            encoder["attention_mask"] = jnp.zeros(shape, bool)
        cache = kind.of(model.init_cache(count, sizes.capacity, **encoder))
        inputs = rows.inputs_with_keys()
        return Slots.of(rows, rows.strategy.initial_state(inputs, cache, sizes.new_token_bucket))

    with use_mesh(mesh):
        shapes = jax.eval_shape(initial_slots, model, map_with_axes(repeated, rows))
    return with_shardings(shapes, mesh, count)


def empty_arrays(shapes: T) -> T:
    """Arrays of zeros of these shapes, made without compiling a program."""
    return jax.tree.map(lambda x: place(np.zeros(x.shape, x.dtype), x.sharding), shapes)


def empty_slots(shapes: Slots, rows: PromptRows) -> Slots:
    """Slots without rows, made without compiling a program. The `reason` 0 is not `RUNNING`.

    Args:
        rows: free slots get the settings of the first one. (With zeros a filter would take its slow
            branch.)
    """

    def filled(axes: Axes, shape: jax.ShapeDtypeStruct, value: np.ndarray) -> jax.Array:
        if "rows" in axes and shape.ndim:
            value = np.repeat(value[:1], shape.shape[0], axis=0)
        return place(value, shape.sharding)

    settings = map_with_axes(filled, shapes.settings, rows.settings)
    strategy = map_with_axes(filled, shapes.strategy, rows.strategy)
    return Slots(strategy, settings, empty_arrays(shapes.state))


# The slots are donated: cache and sequences are updated in place.
@partial(jax.jit, static_argnames=("new_token_bucket",), donate_argnames=("slots",))
def prefill_slots(
    model: FlatModel,
    slots: Slots,
    rows: PromptRows,
    slot_ids: Int[Array, " R"],
    *,
    new_token_bucket: int,
) -> Slots:
    """Prefills R prompts of one bucket, chooses their first tokens, and writes them into slots.

    Args:
        slot_ids: the slot of each prompt; for prompts that only fill up the batch, the number of
            slots, which is no slot.
        new_token_bucket: that of the slots' sizes.
    """
    decoder, rows = model.model(), constrain_fields(rows, batch=len(slot_ids))
    inputs = rows.inputs_with_keys()
    init_cache = partial(decoder.init_cache, len(slot_ids), **inputs.encoder_inputs)
    width = inputs.decoder_inputs["tokens"].shape[1]
    cache = slots.state.cache.for_prompts(init_cache, width, jnp.asarray(inputs.start_len))
    state = first_state(
        rows.strategy, decoder, inputs, cache, rows.settings, new_token_bucket=new_token_bucket
    )
    return write_rows(slots, Slots.of(rows, state), slot_ids)


@partial(jax.jit, static_argnames=("steps_per_check",), donate_argnames=("slots",))
def decode_slots(
    model: FlatModel,
    slots: Slots,
    is_free: Bool[Array, " B"],
    until_free: Int[Array, ""],
    max_steps: Int[Array, ""],
    *,
    steps_per_check: int = 1,
) -> tuple[Slots, DecodeProgress]:
    """Decodes until `until_free` slots are free, all rows are finished, or for `max_steps` steps.

    Args:
        is_free: slots without a task. A row that still runs in one was cancelled, and stops here.
        steps_per_check: steps between two checks of these conditions; see `steps_per_check_for`.

    The host reads a copy: the slots themselves are overwritten by the next call, which need not
    wait for the host.
    """
    strategy, settings, state = slots.strategy, slots.settings, slots.strategy_state
    state = state.replace(reason=jnp.where(is_free, STOP, state.reason))
    state, *counts = decode_loop(
        strategy,
        model.model(),
        state,
        settings,
        until_free=until_free,
        max_steps=max_steps,
        steps_per_check=steps_per_check,
    )
    result = strategy.finish(state, settings)
    # Jobs and servers report neither.
    result = dataclasses.replace(result, beam_indices=None, sequences_scores=None)
    slots = constrain_fields(slots.with_state(state), batch=slots.count)
    return slots, DecodeProgress(result, state.reason == RUNNING, *counts)


def steps_per_check_for(max_steps: int, platform: str) -> int:
    """Steps between two checks of `decode_slots` that suit the platform and divide `max_steps`.

    >>> [steps_per_check_for(steps, "gpu") for steps in (0, 1, 8)], steps_per_check_for(8, "cpu")
    ([4, 1, 4], 1)
    """
    steps = steps_between_checks(platform)
    return 1 if max_steps % steps else steps
