"""KV-cache variants: int8 quantization, sliding window, ring buffer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from jaxllm.cache.attention_view import AttentionView, Branches, SlotIndices, make_view
from jaxllm.cache.kv_cache import KV, KV_AXES, Cache, write_heads
from jaxllm.common.precision import float32_einsum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedKV(KV):
    """Int8 keys and values with one float32 scale per head and slot.

    A vector x is stored as ``round(x / s)`` with ``s = max|x| / 127``: the error is at most s / 2.
    Eager attention multiplies scores and weights by the scales, not keys and values.
    """

    k: Int8[Array, "*BK S H"] = dataclasses.field(metadata=KV_AXES)
    v: Int8[Array, "*BK S H"] = dataclasses.field(metadata=KV_AXES)
    k_scale: Float[Array, "*BK S 1"] = dataclasses.field(metadata=KV_AXES)
    v_scale: Float[Array, "*BK S 1"] = dataclasses.field(metadata=KV_AXES)
    dtype: Any = dataclasses.field(metadata={"static": True})
    """Dtype of computation."""

    @staticmethod
    def like(kv: KV) -> QuantizedKV:
        """An empty quantized cache with the shape of `kv`."""
        numbers = jnp.zeros(kv.k.shape, jnp.int8)
        scale = jnp.zeros((*kv.k.shape[:-1], 1), jnp.float32)
        return QuantizedKV(numbers, numbers, scale, scale, kv.k.dtype)

    def write(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        slots: SlotIndices,
    ) -> QuantizedKV:
        (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
        return dataclasses.replace(
            self,
            k=write_heads(self.k, k, slots),
            v=write_heads(self.v, v, slots),
            k_scale=write_heads(self.k_scale, k_scale, slots),
            v_scale=write_heads(self.v_scale, v_scale, slots),
        )

    def scores(self, q: Float[Array, "*BK Q H"]):
        k = self.k.astype(q.dtype)
        return float32_einsum("...qh,...sh->...qs", q, k) * self.k_scale[..., None, :, 0]

    def weighted_values(self, weights: Float[Array, "*BK Q S"]):
        scaled = (weights * self.v_scale[..., None, :, 0]).astype(self.dtype)
        v = self.v.astype(self.dtype)
        return float32_einsum("...qs,...sh->...qh", scaled, v)

    def dequantized(self) -> KV:
        pairs = (self.k, self.k_scale), (self.v, self.v_scale)
        return KV(*((x.astype(scale.dtype) * scale).astype(self.dtype) for x, scale in pairs))


def quantize(x: Float[Array, "... H"]) -> tuple[Int8[Array, "... H"], Float[Array, "... 1"]]:
    """Quantizes each vector: int8 numbers and its scale.

    >>> numbers, scale = quantize(jnp.array([1.0, -2.54, 0.0]))
    >>> numbers.tolist(), round(float(scale[0]), 4)
    ([50, -127, 0], 0.02)
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    # A vector of zeros has scale 0, and 0 / 0 is NaN.
    return jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8), scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowCache(Cache):
    """Cache of all tokens, as `Cache`, in which a query attends to the newest ones only."""

    window: Int[Array, ""]
    """Number of tokens that a query attends to, its own included."""

    def make_view(
        self,
        mask: Bool[Array, "B T"],
        *,
        cache_is_empty: bool = False,
        branches: Branches | None = None,
    ):
        """`Cache.make_view` limited to the window; pads do not count towards it."""
        view, reserved = super().make_view(mask, cache_is_empty=cache_is_empty, branches=branches)
        return view.within(self.window), reserved


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RingCache(Cache):
    """Ring buffer of the newest tokens: position p is in slot p modulo the number of slots."""

    window: Int[Array, ""]
    """Number of tokens that a query attends to, its own included; at most the number of slots."""

    def make_view(
        self,
        mask: Bool[Array, "B T"],
        *,
        cache_is_empty: bool = False,
        branches: Branches | None = None,
    ):
        """`Cache.make_view` for one new column, or for a whole prompt (`cache_is_empty`).

        A query attends to the last `window` real tokens; pads do not count.
        """
        mask, T, size = jnp.asarray(mask), mask.shape[1], self.capacity
        if T > 1 and not cache_is_empty:
            raise ValueError("a ring takes its new columns one at a time")
        steps = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
        counts = self.next_position[:, None] + steps
        positions, last = jnp.maximum(counts - 1, 0), counts[:, -1:] - 1
        # Position of the newest token that each slot can hold; negative where there is none yet.
        slot_positions = last - (last - jnp.arange(size, dtype=jnp.int32)[None]) % size
        reserved = self.replace(
            mask=slot_positions >= 0, length=self.length + T, next_position=counts[:, -1]
        )
        write_slots = jnp.where(mask & (positions > last - size), positions % size, size)
        if cache_is_empty:
            view = make_view(mask).within(self.window)
            return dataclasses.replace(view, write_slots=write_slots), reserved
        visible = (slot_positions >= 0) & (slot_positions <= positions)
        visible = visible & (slot_positions > positions - self.window)
        view = AttentionView(
            positions=positions,
            query_columns=positions,
            key_columns=slot_positions,
            visible=visible[:, None, None, :],
            rope_length=counts[:, -1:],
            write_slots=write_slots,
            query_index=positions,
            key_index=jnp.broadcast_to(slot_positions, (mask.shape[0], size)),
        )
        return view, reserved


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheKind:
    """Settings of the self-attention KV cache. Cross-attention keys and values stay floats."""

    quantized: bool = dataclasses.field(default=False, metadata={"static": True})
    window: Int[Array, ""] | None = None
    """Window size, as `WindowCache.window`; None: no window."""
    ring: bool = dataclasses.field(default=False, metadata={"static": True})
    """With a window: keep only the tokens in it (`RingCache`)."""

    @staticmethod
    def like(cache: Cache) -> CacheKind:
        """The kind of a cache that a call returned; such a cache is never a ring."""
        return CacheKind(
            quantized=isinstance(cache.layers[0], QuantizedKV),
            window=cache.window if isinstance(cache, WindowCache) else None,
        )

    def convert(self, empty: Cache) -> Cache:
        """Converts a plain empty cache to an empty one of this kind."""
        layers = empty.layers
        if self.quantized:
            layers = tuple(QuantizedKV.like(kv) for kv in layers)
        if self.window is None:
            return empty.replace(layers=layers)
        fields = {**vars(empty), "layers": layers, "window": self.window}
        if self.ring:
            return RingCache(**{**fields, "positions": None})
        return WindowCache(**{**fields, "positions": jnp.zeros(empty.mask.shape, jnp.int32)})


PLAIN = CacheKind()
