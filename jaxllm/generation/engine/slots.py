"""What the device holds: slots, each with a row that is being answered or has been.

A row begins at column 0 of its slot, without padding, and all its numbers (length, limit, key,
settings) are its own, so nothing about its result depends on its neighbours. The first axis of
every array is that of slots (in the cache with heads merged in, unless a mesh splits them).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Shaped, UInt32

from jaxllm.cache import KV, Cache
from jaxllm.generation.engine.on_mesh import place, set_rows, with_places
from jaxllm.generation.engine.settings import RowSettings
from jaxllm.generation.strategy import NEVER
from jaxllm.sharding import use


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """The rows themselves."""

    tokens: Int[Array, "B L"]
    """Prompt and new tokens; what lies beyond `length` has no meaning."""
    start: Int[Array, " B"]
    """Columns of the prompt."""
    length: Int[Array, " B"]
    """Columns in use."""
    live: Bool[Array, " B"]
    """The row goes on."""
    stopped: Bool[Array, " B"]
    """A stop string ended it."""
    broken_at: Int[Array, " B"]
    """The new token at which its logits were not finite, or -1."""
    keys: UInt32[Array, "B K"]
    """Data of the random keys; new token t is drawn with fold_in(key, t)."""
    settings: RowSettings

    def replace(self, **changes) -> Self:
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCache(Cache):
    """A cache whose rows do not touch: RoPE that depends on a length takes the row's own."""

    @classmethod
    def of(cls, cache: Cache) -> Self:
        rows = cache.mask.shape[:1]
        fields = {field.name: getattr(cache, field.name) for field in dataclasses.fields(cache)}
        return cls(**{**fields, "length": jnp.broadcast_to(cache.length, rows)})

    def look(self, mask, *, fresh=False, branches=None):
        view, reserved = super().look(mask, fresh=fresh, branches=branches)
        return dataclasses.replace(view, horizon=reserved.next_position), reserved


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The state that both programs take and give back, in place."""

    texts: Texts
    cache: SlotCache

    @property
    def count(self) -> int:
        return self.texts.live.shape[0]

    def put(self, texts: Texts, cache: SlotCache, at: Int[Array, " R"]) -> Slots:
        """New rows in the slots `at`; one beyond the last slot is left out.

        The cache of the new rows may be shorter than the slots', and so may its encoder's part.
        """
        return Slots(
            texts=jax.tree.map(lambda old, new: put_rows(old, new, at), self.texts, texts),
            cache=self.cache.replace(
                layers=put_layers(self.cache.layers, cache.layers, at),
                mask=put_rows(self.cache.mask, cache.mask, at),
                length=put_rows(self.cache.length, cache.length, at),
                next_position=put_rows(self.cache.next_position, cache.next_position, at),
                cross=put_layers(self.cache.cross, cache.cross, at),
                cross_mask=put_rows(self.cache.cross_mask, cache.cross_mask, at),
            ),
        )


def put_rows(old: Shaped[Array, "B ..."] | None, new: Any, at: Int[Array, " R"]) -> Any:
    """Rows of `old` replaced; what they lack in columns is zeros."""
    if old is None:
        return None
    if old.ndim > 1 and new.shape[1] < old.shape[1]:
        rest = [(0, 0)] * (old.ndim - 2)
        new = jnp.pad(new, ((0, 0), (0, old.shape[1] - new.shape[1]), *rest))
    return set_rows(old, jnp.asarray(new, old.dtype), at)


def put_layers(old: tuple[KV, ...] | None, new: Any, at: Int[Array, " R"]) -> Any:
    """The first slots of keys and values of some rows replaced; later ones are masked anyway."""
    if old is None:
        return None

    def put(
        old: Shaped[Array, "*BK S H"], new: Shaped[Array, "*RK P H"]
    ) -> Shaped[Array, "*BK S H"]:
        if old.ndim == 4:
            return set_rows(old, new, at, ("rows", "heads"))
        heads = new.shape[0] // at.shape[0]
        return set_rows(old, new, (at[:, None] * heads + jnp.arange(heads)).reshape(-1))

    return jax.tree.map(put, old, new)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Rows that are to be read and put into slots."""

    texts: Texts
    """With the prompt, padded to its bucket, as `tokens` [R, P]; `keys` are still to be made."""
    draws: UInt32[Array, "R 3"]
    """Seed, number of the row and number of the sample: what the row's key is made of."""
    encoder: dict[str, Any]
    """What `model.start` takes, of an encoder-decoder."""


class Seen(NamedTuple):
    """What the host looks at after a while of decoding."""

    tokens: Int[Array, "B L"]
    start: Int[Array, " B"]
    length: Int[Array, " B"]
    live: Bool[Array, " B"]
    stopped: Bool[Array, " B"]
    broken_at: Int[Array, " B"]
    steps: Int[Array, ""]
    """Steps of this while."""
    busy: Int[Array, ""]
    """Tokens that they gave: the sum over the steps of the rows that were live."""


def key_width() -> int:
    """Words of a random key of JAX's default kind."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape[0]


def slot_shapes(
    model: Any,
    count: int,
    capacity: int,
    source: int | None,
    settings: RowSettings,
    mesh: Mesh | None = None,
) -> Slots:
    """The shapes and dtypes of slots, and where they lie on a mesh.

    Args:
        capacity: columns of a slot.
        source: columns of the encoder's input, of an encoder-decoder.
        settings: of some row, on the host.
    """

    def shape(dtype: Any, *columns: int) -> Any:
        return jax.ShapeDtypeStruct((count, *columns), dtype)

    texts = Texts(
        tokens=shape(np.int32, capacity),
        start=shape(np.int32),
        length=shape(np.int32),
        live=shape(bool),
        stopped=shape(bool),
        broken_at=shape(np.int32),
        keys=shape(np.uint32, key_width()),
        settings=jax.tree.map(lambda x: shape(x.dtype, *x.shape[1:]), settings),
    )
    with use(mesh):
        cache = jax.eval_shape(lambda model: start_cache(model, count, capacity, source), model)
    return with_places(Slots(texts=texts, cache=cache), mesh)


def empty_slots(shapes: Slots, settings: RowSettings) -> Slots:
    """Slots without rows. No program is compiled for them.

    Args:
        settings: of some row, [1]: what stands in a slot before its first row. (Zeros would ask
            for the slow way of a filter.)
    """

    def zeros(shape: Any) -> jax.Array:
        return place(np.zeros(shape.shape, shape.dtype), shape.sharding)

    def repeated(shape: Any, value: np.ndarray) -> jax.Array:
        return place(np.repeat(value, shapes.count, axis=0), shape.sharding)

    slots, texts = jax.tree.map(zeros, shapes), shapes.texts
    first = slots.texts.replace(
        settings=jax.tree.map(repeated, texts.settings, settings),
        broken_at=repeated(texts.broken_at, np.full(1, NEVER, np.int32)),
    )
    return dataclasses.replace(slots, texts=first)


def start_cache(model: Any, count: int, capacity: int, source: int | None) -> SlotCache:
    """The cache of `count` slots. Traced for its shapes alone."""
    encoder = {}
    if source is not None:
        shape = (count, source)
        encoder = {"input_ids": jnp.zeros(shape, jnp.int32)}
        encoder["attention_mask"] = jnp.zeros(shape, bool)
    return SlotCache.of(model.start(count, capacity, **encoder))
