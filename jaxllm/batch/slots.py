"""What the device holds: slots, each with a row that is being answered or has been.

A row begins at column 0 of its slot, without padding, and all its numbers (length, limit, key,
settings) are its own, so nothing about its result depends on its neighbours. The first axis of
every array is that of slots (in the cache with heads merged in, unless a mesh splits them).

What a slot holds besides, and how it goes on, is a `SlotStrategy`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import of_layers, place, set_rows, with_places
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.sharding import use

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """The settings of B rows, a number each."""

    processors: LogitsProcessorList
    """Leaves have a first axis of rows (`stacked`)."""
    eos: Int[Array, "B E"]
    """Filled up with -1."""
    limit: Int[Array, " B"]
    """Columns of the longest result."""
    sampled: Bool[Array, " B"]
    watched: Bool[Array, "B M"]
    """Which of the program's lists of stop strings are the row's."""
    allow_nonfinite: Bool[Array, " B"]
    length_penalty: Float[Array, " B"]
    """Of beams."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCache(Cache):
    """A cache whose rows do not touch: RoPE that depends on a length takes the row's own."""

    @classmethod
    def of(cls, cache: Cache) -> Self:
        rows = cache.mask.shape[:1]
        fields = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
        return cls(**{**fields, "length": jnp.broadcast_to(cache.length, rows)})

    def aligned(self) -> Self:
        return self

    def make_view(self, mask, *, fresh=False, branches=None):
        view, reserved = super().make_view(mask, fresh=fresh, branches=branches)
        return dataclasses.replace(view, horizon=reserved.next_position), reserved


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Rows that are to be read and put into slots."""

    tokens: Int[Array, "R P"]
    """The prompts, padded to their bucket."""
    start: Int[Array, " R"]
    """Columns of each prompt."""
    draws: UInt32[Array, "R 3"]
    """Seed, number of the row and number of the sample: what the row's key is made of."""
    settings: RowSettings
    encoder: dict[str, Any]
    """What `model.start` takes, of an encoder-decoder."""

    def keys(self) -> Any:
        """Those that `generate(..., key=seed, row_ids=[row])` gives its samples."""

        def one(seed, row, sample):
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), sample)

        return jax.vmap(one)(self.draws[:, 0], self.draws[:, 1], self.draws[:, 2])


class SlotOutputs(NamedTuple):
    """The M texts of each slot, as far as they are."""

    tokens: Int[Array, "B M L"]
    """Prompt and new tokens; what lies beyond `length` has no meaning."""
    start: Int[Array, " B"]
    """Columns of the prompt."""
    length: Int[Array, "B M"]
    """Columns in use."""
    stopped: Bool[Array, "B M"]
    """A stop string ended it, unless an end token did."""
    first_nonfinite_step: Int[Array, " B"]
    """The new token at which its logits were not finite, or -1."""


class Slots:
    """The state that both programs take and give back, in place: a dataclass of arrays."""

    live: Bool[Array, " B"]
    """The row goes on."""
    settings: RowSettings

    @property
    def count(self) -> int:
        return self.live.shape[0]


class SlotStrategy(Protocol):
    """What a slot holds and how it goes on; hashable, since programs follow from it."""

    @property
    def beams(self) -> int:
        """Sequences that a slot searches."""
        ...

    def blank(self, arrivals: Arrivals, cache: Cache, sizes: Sizes) -> Slots:
        """Slots of rows whose prompts are in the cache, before anything is chosen."""
        ...

    def first(
        self, arrivals: Arrivals, read: DecodeOutput, stops: StoppingCriteriaList, sizes: Sizes
    ) -> Slots:
        """Slots after the first token, from what the model read of the prompts."""
        ...

    def step(self, model: Any, slots: Any, stops: StoppingCriteriaList) -> Slots:
        """One more token for every live row.

        The newest token is not in the cache yet. A free slot's `length` is then 0, so that it does
        not make the others read more of the cache.
        """
        ...

    def texts(self, slots: Any) -> SlotOutputs:
        """What rows that are over end with."""
        ...


def put(old: T, new: T, at: Int[Array, " R"]) -> T:
    """New rows in the slots `at`; one beyond the last slot is left out.

    Arrays of the new rows may be shorter than those of the slots on any other axis. The rest is
    zeros then: also of keys and values, which are masked, since a NaN that the row before has left
    there would not stay behind the mask (0 * NaN is NaN).
    """

    def one(path, old: Shaped[Array, "B ..."], new: Any):
        return put_layer(old, new, at) if of_layers(path) else put_rows(old, new, at)

    return jax.tree_util.tree_map_with_path(one, old, new)


def put_rows(
    old: Shaped[Array, "B ..."], new: Any, at: Int[Array, " R"], axes: tuple[str, ...] = ("rows",)
) -> Shaped[Array, "B ..."]:
    """Rows of `old` replaced; what they lack in columns is zeros. `axes`: as of `set_rows`."""
    rest = [(0, have - got) for have, got in zip(old.shape[1:], new.shape[1:], strict=True)]
    return set_rows(old, jnp.pad(jnp.asarray(new, old.dtype), [(0, 0), *rest]), at, axes)


def put_layer(
    old: Shaped[Array, "*BK S H"], new: Shaped[Array, "*RK P H"], at: Int[Array, " R"]
) -> Shaped[Array, "*BK S H"]:
    """Keys or values of some rows replaced."""
    if old.ndim == 4:
        return put_rows(old, new, at, ("rows", "heads"))
    heads = new.shape[0] // at.shape[0]
    return put_rows(old, new, (at[:, None] * heads + jnp.arange(heads)).reshape(-1))


def slot_shapes(
    model: Any,
    strategy: SlotStrategy,
    sizes: Sizes,
    settings: RowSettings,
    mesh: Mesh | None = None,
) -> Slots:
    """The shapes and dtypes of slots, and where they lie on a mesh.

    Args:
        settings: of some rows, on the host.
    """
    count = sizes.slots
    arrays: dict[str, Any] = {
        "tokens": np.zeros((count, 1), np.int32),
        "start": np.zeros(count, np.int32),
        "draws": np.zeros((count, 3), np.uint32),
    }
    repeated = jax.tree.map(lambda x: np.repeat(x[:1], count, axis=0), settings)
    arrivals = Arrivals(**arrays, settings=repeated, encoder={})

    def blank(model: Any, arrivals: Arrivals) -> Slots:
        cache = start_cache(model, count, sizes.capacity, sizes.source)
        return strategy.blank(arrivals, cache, sizes)

    with use(mesh):
        shapes = jax.eval_shape(blank, model, arrivals)
    return with_places(shapes, mesh)


def empty_slots(shapes: Any, settings: RowSettings) -> Any:
    """Slots without rows. No program is compiled for them.

    Args:
        settings: of some row, [1]: what stands in a slot before its first row. (Zeros would ask
            for the slow way of a filter.)
    """

    def zeros(shape: Any) -> jax.Array:
        return place(np.zeros(shape.shape, shape.dtype), shape.sharding)

    def repeated(shape: Any, value: np.ndarray) -> jax.Array:
        return place(np.repeat(value, shape.shape[0], axis=0), shape.sharding)

    stated = jax.tree.map(repeated, shapes.settings, settings)
    rest = jax.tree.map(zeros, dataclasses.replace(shapes, settings=None))
    return dataclasses.replace(rest, settings=stated)


def start_cache(model: Any, count: int, capacity: int, source: int | None) -> SlotCache:
    """The cache of `count` slots. Traced for its shapes alone."""
    encoder = {}
    if source is not None:
        shape = (count, source)
        encoder = {"input_ids": jnp.zeros(shape, jnp.int32)}
        encoder["attention_mask"] = jnp.zeros(shape, bool)
    return SlotCache.of(model.start(count, capacity, **encoder))
