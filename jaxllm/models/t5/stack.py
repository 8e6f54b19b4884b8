"""Builds T5's encoder and decoder stacks from the shared blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.models.build_options import Options
from jaxllm.models.t5.config import T5Config
from jaxllm.nn.activations import activation
from jaxllm.nn.attention import Attention
from jaxllm.nn.blocks import Block, Stack
from jaxllm.nn.linear import Linear
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.relative_bias import RelativeBias


def float32_if_half(dtypes: dict[str, Any]) -> dict[str, Any]:
    """Replaces half-precision dtypes by float32: `wo` overflows or rounds badly in less."""
    half = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
    return {k: jnp.float32 if jnp.dtype(v) in half else v for k, v in dtypes.items()}


def clamp_to_float16(x: jax.Array) -> jax.Array:
    """Clamps float16 activations to finite values, as in Hugging Face; other dtypes are unchanged.

    As `wo` is float32, the residual stream is too, from the first feed-forward layer on.
    """
    if x.dtype != jnp.float16:
        return x
    top = jnp.finfo(jnp.float16).max
    limit = jnp.where(jnp.isinf(x).any(), top - 1000, top).astype(x.dtype)
    return jnp.clip(x, -limit, limit)


def make_stack(
    config: T5Config, options: Options, *, decoder: bool, rngs: nnx.Rngs | None
) -> Stack:
    """Encoder, or decoder with cross-attention. Scores are not scaled; the init of q is."""
    c, dtypes, factor = config, options.dtypes, config.initializer_factor
    inner = c.num_heads * c.d_kv
    half = jnp.dtype(options.dtype) == jnp.float16

    def project(inputs: int, outputs: int, std: float, dtypes: dict[str, Any] = dtypes) -> Linear:
        return Linear(inputs, outputs, std=factor * std, rngs=rngs, **dtypes)

    def attention() -> Attention:
        return Attention(
            q=project(c.d_model, inner, (c.d_model * c.d_kv) ** -0.5),
            k=project(c.d_model, inner, c.d_model**-0.5),
            v=project(c.d_model, inner, c.d_model**-0.5),
            o=project(inner, c.d_model, inner**-0.5),
            heads=c.num_heads,
            kv_heads=c.num_heads,
            head_dim=c.d_kv,
            scale=1.0,
            dropout_rate=c.dropout_rate,
            implementation=options.attn_implementation,
        )

    def feed_forward() -> MLP | GatedMLP:
        act = activation(c.act, where="feed_forward_proj")
        up = project(c.d_model, c.d_ff, c.d_model**-0.5)
        down = project(c.d_ff, c.d_model, c.d_ff**-0.5, float32_if_half(dtypes))
        if not c.gated:
            return MLP(up, down, act, dropout_rate=c.dropout_rate)
        gate = project(c.d_model, c.d_ff, c.d_model**-0.5)
        return GatedMLP(gate, up, down, act, dropout_rate=c.dropout_rate)

    def rms() -> RMSNorm:
        return RMSNorm(c.d_model, eps=c.layer_norm_epsilon, **dtypes)

    def block() -> Block:
        return Block(
            rms(),
            attention(),
            rms(),
            feed_forward(),
            cross_norm=rms() if decoder else None,
            cross=attention() if decoder else None,
            dropout_rate=c.dropout_rate,
            clamp=clamp_to_float16 if half else None,
        )

    depth = c.decoder_layers if decoder else c.num_layers
    bias = [
        RelativeBias(
            c.relative_attention_num_buckets,
            c.relative_attention_max_distance,
            c.num_heads,
            bidirectional=not decoder,
            std=factor * c.d_model**-0.5,
            rngs=rngs,
            **dtypes,
        )
        for _ in range(depth if c.bias_per_layer else 1)
    ]
    return Stack(
        [block() for _ in range(depth)],
        rms(),
        position_bias=bias,
        embedding_dropout=c.dropout_rate,
        output_dropout=c.dropout_rate,
        remat=options.remat,
    )
