"""Arrays of the batch engine: slots, rows that go into them, and the sequences that come out.

A row begins at column 0 of its slot, without padding, and all its numbers (lengths, key, settings)
are its own, so nothing about its result depends on its neighbours. The first axis of every array is
that of slots (in the cache with heads merged in, unless a mesh splits them). `SlotStrategy` says
how slots are decoded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.processors import LogitsProcessorList


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSettings:
    """The settings of B rows, a number each."""

    processors: LogitsProcessorList
    """Leaves have a first axis of rows (`stacked`)."""
    eos: Int[Array, "B E"]
    """Filled up with -1."""
    max_length: Int[Array, " B"]
    """Columns of the longest result."""
    sampled: Bool[Array, " B"]
    watched: Bool[Array, "B M"]
    """Which of the program's lists of stop strings are the row's."""
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

    def make_view(self, mask, *, cache_is_empty=False, branches=None):
        view, reserved = super().make_view(mask, cache_is_empty=cache_is_empty, branches=branches)
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
    """The M sequences of each slot, as far as they are generated."""

    tokens: Int[Array, "B M L"]
    """Prompt and new tokens; what lies beyond `length` has no meaning."""
    start: Int[Array, " B"]
    """Columns of the prompt."""
    length: Int[Array, "B M"]
    """Columns in use."""
    stopped: Bool[Array, "B M"]
    """A stop string or an end token ended it."""
    first_nonfinite_step: Int[Array, " B"]
    """The new token at which its logits were not finite, or -1."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """State of both programs, which update it in place."""

    state: Any
    """The strategy's state: a row for each slot. Its random keys are kept as data."""
    live: Bool[Array, " B"]
    """The row goes on."""
    settings: RowSettings

    @property
    def count(self) -> int:
        return self.live.shape[0]
