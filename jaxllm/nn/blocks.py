"""Pre-norm transformer block, shared by all model families."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxllm.cache.attention_view import AttentionView, SequenceMask
from jaxllm.cache.kv_cache import KV
from jaxllm.nn.attention import Attention
from jaxllm.nn.blockwise import ColumnBias
from jaxllm.nn.dropout import dropout, split_key
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.norm import LayerNorm, RMSNorm
from jaxllm.parallel.sharding import constrain

M = TypeVar("M")


def shallow_copy(module: M, **attributes: Any) -> M:
    """Copies a module with some attributes replaced; all others are shared."""
    copied = copy.copy(module)
    for name, value in attributes.items():
        # nnx's own setter raises while an enclosing jit is traced.
        object.__setattr__(copied, name, value)
    return copied


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs that all blocks of one call share: attention view, rotary angles, biases."""

    view: AttentionView
    rotary: tuple[Array, Array] | None = None
    """Cosines and sines [B, T, 1, H]."""
    bias: Float[Array, "#B N T S"] | ColumnBias | None = None
    """Bias added to the self-attention scores."""
    cross_visible: Bool[Array, "B 1 #T E"] | SequenceMask | None = None
    """Cross-attention mask: True at encoder positions to attend to. Required with an encoder."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Rare inputs of one block; all None in plain inference."""

    head_mask: Float[Array, " N"] | None = None
    cross_head_mask: Float[Array, " N"] | None = None
    key: Array | None = None
    """Dropout key; None in inference."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOutput:
    """Output of one block."""

    x: Float[Array, "B T D"]
    kv: KV | None
    """The layer's KV cache with the new positions written; None without a cache."""
    attentions: Float[Array, "B N T S"] | None
    """Self-attention weights, if requested."""
    cross_attentions: Float[Array, "B N T E"] | None
    """Cross-attention weights, if requested."""


class Block(nnx.Module):
    """Pre-norm block: ``x += attn(norm(x))``, cross-attention if any, ``x += mlp(norm(x))``.

    `clamp` is applied after each residual addition (T5 in float16 clamps there).
    """

    def __init__(
        self,
        attn_norm: RMSNorm | LayerNorm,
        attn: Attention,
        mlp_norm: RMSNorm | LayerNorm,
        mlp: MLP | GatedMLP,
        cross_norm: RMSNorm | LayerNorm | None = None,
        cross: Attention | None = None,
        *,
        dropout_rate: float = 0.0,
        clamp: Callable[[Array], Array] | None = None,
    ):
        self.attn_norm, self.attn = attn_norm, attn
        self.cross_norm, self.cross = cross_norm, cross
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.dropout_rate, self.clamp = dropout_rate, clamp

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: KV | None,
        cross_kv: KV | None,
        options: BlockOptions,
        *,
        cache_is_empty: bool,
        want_weights: bool,
    ) -> BlockOutput:
        keys = split_key(options.key, 7)
        attn_key, attn_drop, cross_key, cross_drop, mlp_key, mlp_drop, kv_key = keys
        y, y_of_k, y_of_v = self.attn_norm.for_products(x, 3)
        k, v = self.attn.keys_values(y_of_k, context.rotary, kv_key, value_input=y_of_v)
        kv = used_slots = None
        if cache is not None and context.view.write_slots is not None:
            cache = kv = cache.write(k, v, context.view.write_slots)
            used_slots = context.view.used_slots
        if kv is None or cache_is_empty:  # attend to the new positions only
            kv, used_slots = KV.from_sequence(k, v), None
        y, weights = self.attn(
            y,
            kv,
            visible=context.view.visible,
            rotary=context.rotary,
            bias=context.bias,
            head_mask=options.head_mask,
            key=attn_key,
            want_weights=want_weights,
            used_slots=used_slots,
        )
        x = self._add(x, y, attn_drop)
        cross_weights = None
        if self.cross is not None and self.cross_norm is not None and cross_kv is not None:
            assert context.cross_visible is not None
            (y,) = self.cross_norm.for_products(x, 1)
            y, cross_weights = self.cross(
                y,
                cross_kv,
                visible=context.cross_visible,
                head_mask=options.cross_head_mask,
                key=cross_key,
                want_weights=want_weights,
            )
            x = self._add(x, y, cross_drop)
        y = self.mlp(*self.mlp_norm.for_products(x, self.mlp.products), key=mlp_key)
        x = self._add(x, y, mlp_drop)
        return BlockOutput(x, cache, weights, cross_weights)

    def _add(self, x: Array, y: Array, key: Array | None):
        # With this constraint XLA all-reduces the partial sums of tensor parallelism.
        x = constrain(x + dropout(y, self.dropout_rate, key), "rows")
        return x if self.clamp is None else self.clamp(x)
