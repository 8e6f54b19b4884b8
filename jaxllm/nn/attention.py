"""Grouped-query attention: self- and cross-attention of all model families."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import SequenceMask, mask_array
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import UnsupportedError, quoted
from jaxllm.nn.blockwise import BY_PARTS, QUERY_BLOCK, ColumnBias, attend_blocks
from jaxllm.nn.dropout import dropout, split_key
from jaxllm.nn.head_products import cache_has_head_axis, scores_of_keys, sums_of_values
from jaxllm.nn.linear import Linear
from jaxllm.nn.platform import attend_cache, largest_scores, split_heads
from jaxllm.nn.rope import rotate
from jaxllm.parallel.sharding import constrain

IMPLEMENTATIONS = ("eager", "xla", "cudnn", *BY_PARTS)
PLATFORM_IMPLEMENTATIONS = {"tpu": "splash", "gpu": "blockwise", "cuda": "blockwise"}
"""Implementation that "auto" selects; eager on other platforms."""


def implementation_for(name: str, platform: str) -> str:
    """Resolves `attn_implementation` "auto" for a platform.

    Raises:
        UnsupportedError: the kernel is not one of the platform.

    >>> implementation_for("auto", "cpu"), implementation_for("auto", "tpu")
    ('eager', 'splash')
    """
    if name == "splash" and platform != "tpu":
        raise UnsupportedError(
            f"attn_implementation: splash is a kernel for TPUs, and this runs on {platform}; "
            "choose auto, eager or blockwise"
        )
    return PLATFORM_IMPLEMENTATIONS.get(platform, "eager") if name == "auto" else name


def attend(
    q: Float[Array, "B T N H"],
    kv: KV,
    *,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None = None,
    scale: float,
    head_mask: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """Eager attention (the reference): the output and the attention weights.

    Scores and softmax are in float32. The mask is boolean and applied once, after the bias. A query
    with no visible key gets zeros, never NaN.
    """
    B, T, N, H = q.shape
    K, S = math.prod(kv.leading_shape) // B, kv.capacity
    G = N // K
    grouped = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(*kv.leading_shape, G * T, H)
    scores = scores_of_keys(kv, grouped).reshape(B, N, T, S) * scale
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    # PERF(cpu): values are summed before the division by the softmax sums, as in FlashAttention
    # (Dao et al. 2022, arXiv:2205.14135): fewer passes over [T, S], gradients in half the time;
    # benchmarks/train.py.
    exps = jnp.exp(scores - jax.lax.stop_gradient(largest_scores(scores)))
    sums = exps.sum(axis=-1, keepdims=True)
    exps = dropout(exps, dropout_rate, key)
    if head_mask is not None:
        exps = exps * head_mask[:, None, None].astype(jnp.float32)
    summed = sums_of_values(kv, exps.reshape(*kv.leading_shape, G * T, S))
    # Queries without a visible key are masked last, where a TPU fuses it with the division.
    sees_any = visible.any(axis=-1, keepdims=True)
    out = jnp.where(sees_any, summed.reshape(B, N, T, H) / sums, 0)
    out = out.astype(q.dtype).transpose(0, 2, 1, 3)
    return out, jnp.where(sees_any, exps / sums, 0).astype(q.dtype)


def attend_fused(
    q: Float[Array, "B T N H"],
    kv: KV,
    *,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
    scale: float,
    implementation: Any,
) -> Float[Array, "B T N H"]:
    """Attention with `jax.nn.dot_product_attention`: XLA's, or cuDNN's flash kernel."""
    B, T, N, H = q.shape
    K, S = math.prod(kv.leading_shape) // B, kv.capacity
    kv = kv.dequantized()
    k, v = (x.reshape(B, K, S, H).transpose(0, 2, 1, 3) for x in (kv.k, kv.v))
    mask = jnp.broadcast_to(visible, (B, 1, T, S))
    if bias is not None:
        bias = jnp.broadcast_to(bias, (B, N, T, S)).astype(q.dtype)
    out = jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=mask, scale=scale, implementation=implementation
    )
    sees_something = mask.any(axis=-1).transpose(0, 2, 1)[..., None]
    return jnp.where(sees_something, out, 0)


class Attention(nnx.Module):
    """Attention layer: query, key, value and output projections around `attend`.

    The caller passes positions as rotary angles or a bias, or neither. `q_norm` and `k_norm`
    normalise each head's query and key before RoPE (Qwen3). With a `window` a query attends to the
    last `window` tokens only, its own included (Mistral).
    """

    def __init__(
        self,
        q: Linear,
        k: Linear,
        v: Linear,
        o: Linear,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        dropout_rate: float = 0.0,
        implementation: str = "eager",
        q_norm: Callable[[Array], Array] | None = None,
        k_norm: Callable[[Array], Array] | None = None,
        window: int | None = None,
    ):
        if implementation not in IMPLEMENTATIONS:
            raise UnsupportedError(
                f"attn_implementation: unknown {quoted(implementation)}; "
                f"known: {', '.join(IMPLEMENTATIONS)}"
            )
        self.q, self.k, self.v, self.o = q, k, v, o
        self.q_norm, self.k_norm, self.window = q_norm, k_norm, window
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale, self.dropout_rate, self.implementation = scale, dropout_rate, implementation

    @property
    def cache_head_axis(self) -> bool:
        """True if heads have an axis of their own in its cache (`KV`)."""
        # Splash attention is what a model on a TPU has.
        return self.implementation == "splash" and cache_has_head_axis(self.head_dim)

    def keys_values(
        self,
        x: Float[Array, "B S D"],
        rotary: tuple[Array, Array] | None = None,
        key: jax.Array | None = None,
        *,
        value_input: Float[Array, "B S D"] | None = None,
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Keys and values of x; the values of `value_input`, if given, which equals x."""
        value_input = x if value_input is None else value_input
        shape = (*x.shape[:2], self.kv_heads, self.head_dim)
        k_key, v_key = split_key(key, 2)
        k, v = self.k(x, k_key).reshape(shape), self.v(value_input, v_key).reshape(shape)
        k = k if self.k_norm is None else self.k_norm(k)
        k, v = constrain((k, v), "rows", None, "heads")
        return (k if rotary is None else rotate(k, *rotary)), v

    def __call__(
        self,
        x: Float[Array, "B T D"],
        kv: KV,
        *,
        visible: Bool[Array, "B 1 #T S"] | SequenceMask,
        rotary: tuple[Array, Array] | None = None,
        bias: Float[Array, "#B N T S"] | ColumnBias | None = None,
        head_mask: Float[Array, " N"] | None = None,
        key: jax.Array | None = None,
        want_weights: bool = False,
        used_slots: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B N T S"] | None]:
        """Attends from x to the keys and values, and applies the output projection.

        Args:
            want_weights: also return the attention weights.
            used_slots: number of the cache's first slots that hold tokens; None: any slot may.
        """
        B, T, _ = x.shape
        key, q_key, o_key = split_key(key, 3)
        q = self.q(x, q_key)
        if rotary is None:
            q = split_heads(q, self.heads)
        else:  # RoPE on a TPU has the projection inside its product
            q = q.reshape(B, T, self.heads, self.head_dim)
        q = constrain(q if self.q_norm is None else self.q_norm(q), "rows", None, "heads")
        if rotary is not None:
            q = rotate(q, *rotary)
        weights = None
        key = key if self.dropout_rate else None
        if isinstance(visible, SequenceMask) and not want_weights:
            out = self._attend_sequence(q, kv, visible, bias, head_mask, key)
        else:
            visible = mask_array(visible)
            bias = bias.array() if isinstance(bias, ColumnBias) else bias
            # Only eager attention returns weights and supports a head mask and dropout.
            if want_weights or head_mask is not None or key is not None:
                out, weights = self._eager(
                    q, kv, visible=visible, bias=bias, head_mask=head_mask, key=key
                )
            else:
                out = self._attend(q, kv, visible, bias, used_slots)
        y = self.o(out.reshape(B, T, self.heads * self.head_dim), o_key)
        return y, (weights if want_weights else None)

    def _eager(
        self, q: Float[Array, "B T N H"], kv: KV, **options: Any
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
        return attend(q, kv, scale=self.scale, dropout_rate=self.dropout_rate, **options)

    def _attend_sequence(
        self,
        q: Float[Array, "B T N H"],
        kv: KV,
        mask: SequenceMask,
        bias: ColumnBias | Float[Array, "#B N T S"] | None,
        head_mask: Float[Array, " N"] | None,
        key: jax.Array | None,
    ) -> Float[Array, "B T N H"]:
        """Attention of whole sequences without an array [T, S]; eager for a few queries."""

        def eager(q: Array, kv: KV, **options: Any) -> Array:
            return self._eager(q, kv, head_mask=head_mask, **options)[0]

        if self.implementation == "splash" and bias is None and head_mask is None and key is None:
            # Pallas takes a second to import.
            from jaxllm.nn.splash import attend_splash, splash_applies

            if splash_applies(q.shape[1], mask):
                return attend_splash(q, kv, mask=mask, scale=self.scale)
        if q.shape[1] > QUERY_BLOCK and not isinstance(bias, jax.Array):
            return attend_blocks(eager, q, kv, mask=mask, bias=bias, key=key)
        bias = bias.array() if isinstance(bias, ColumnBias) else bias
        return eager(q, kv, visible=mask.array(), bias=bias, key=key)

    def _attend(
        self,
        q: Float[Array, "B T N H"],
        kv: KV,
        visible: Bool[Array, "B 1 #T S"],
        bias: Float[Array, "#B N T S"] | None,
        used_slots: Int[Array, ""] | None,
    ) -> Float[Array, "B T N H"]:
        """Attention that returns no weights, without head mask and dropout."""
        if self.implementation in ("xla", "cudnn"):
            implementation, scale = self.implementation, self.scale
            return attend_fused(
                q, kv, visible=visible, bias=bias, scale=scale, implementation=implementation
            )

        def run(q: Array, kv: KV, visible: Array, bias: Array | None):
            return attend(q, kv, visible=visible, bias=bias, scale=self.scale)[0]

        return attend_cache(run, q, kv, used_slots, visible=visible, bias=bias, scale=self.scale)
