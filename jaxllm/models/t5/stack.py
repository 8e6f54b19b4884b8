"""Builds T5's encoder and decoder stacks from the shared blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.models.build_options import Options
from jaxllm.models.t5.config import T5Config
from jaxllm.nn.activations import activation
from jaxllm.nn.attention import Attention
from jaxllm.nn.blocks import Block
from jaxllm.nn.linear import Linear
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.relative_bias import RelativeBias
from jaxllm.nn.stack import Stack


def wo_dtypes(dtype: DTypeLike, param_dtype: DTypeLike) -> dict[str, DTypeLike]:
    """Dtypes of `wo`, which computes in float32 where the other layers compute in half precision.

    Its weights are float32 in place of float16, where they overflow; bfloat16 ones stay, as in
    Hugging Face.
    """
    half = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
    return {
        "dtype": jnp.float32 if jnp.dtype(dtype) in half else dtype,
        "param_dtype": jnp.float32 if jnp.dtype(param_dtype) == jnp.float16 else param_dtype,
    }


def clamp_to_float16(x: jax.Array) -> jax.Array:
    """Clamps float16 activations to finite values, as in Hugging Face; other dtypes are unchanged.

    As `wo` computes in float32, the residual stream is too, from the first feed-forward layer on.
    """
    if x.dtype != jnp.float16:
        return x
    top = jnp.finfo(jnp.float16).max
    limit = jnp.where(jnp.isinf(x).any(), top - 1000, top).astype(x.dtype)
    return jnp.clip(x, -limit, limit)


@dataclasses.dataclass(frozen=True)
class T5Layers:
    """Builds the layers of a stack with the sizes and dtypes of one model."""

    config: T5Config
    options: Options
    rngs: nnx.Rngs | None

    def linear(self, inputs: int, outputs: int, std: float, **dtypes: Any) -> Linear:
        """Linear without bias, drawn with `std` times the config's `initializer_factor`."""
        dtypes = {**self.options.dtypes, **dtypes}
        std = self.config.initializer_factor * std
        return Linear(inputs, outputs, std=std, rngs=self.rngs, **dtypes)

    def norm(self) -> RMSNorm:
        c = self.config
        return RMSNorm(c.d_model, eps=c.layer_norm_epsilon, **self.options.dtypes)

    def attention(self) -> Attention:
        """Attention without scale: the initial weights of q are scaled instead."""
        c = self.config
        inner = c.num_heads * c.d_kv
        return Attention(
            q=self.linear(c.d_model, inner, (c.d_model * c.d_kv) ** -0.5),
            k=self.linear(c.d_model, inner, c.d_model**-0.5),
            v=self.linear(c.d_model, inner, c.d_model**-0.5),
            o=self.linear(inner, c.d_model, inner**-0.5),
            heads=c.num_heads,
            kv_heads=c.num_heads,
            head_dim=c.d_kv,
            scale=1.0,
            dropout_rate=c.dropout_rate,
            implementation=self.options.attn_implementation,
        )

    def mlp(self) -> MLP | GatedMLP:
        c = self.config
        act = activation(c.act, where="feed_forward_proj")
        up = self.linear(c.d_model, c.d_ff, c.d_model**-0.5)
        down = self.linear(c.d_ff, c.d_model, c.d_ff**-0.5, **wo_dtypes(**self.options.dtypes))
        if not c.gated:
            return MLP(up, down, act, dropout_rate=c.dropout_rate)
        gate = self.linear(c.d_model, c.d_ff, c.d_model**-0.5)
        return GatedMLP(gate, up, down, act, dropout_rate=c.dropout_rate)

    def block(self, *, decoder: bool) -> Block:
        return Block(
            self.norm(),
            self.attention(),
            self.norm(),
            self.mlp(),
            cross_norm=self.norm() if decoder else None,
            cross=self.attention() if decoder else None,
            dropout_rate=self.config.dropout_rate,
            clamp=clamp_to_float16 if jnp.dtype(self.options.dtype) == jnp.float16 else None,
        )

    def relative_bias(self, *, decoder: bool) -> RelativeBias:
        c = self.config
        return RelativeBias(
            c.relative_attention_num_buckets,
            c.relative_attention_max_distance,
            c.num_heads,
            bidirectional=not decoder,
            std=c.initializer_factor * c.d_model**-0.5,
            rngs=self.rngs,
            **self.options.dtypes,
        )


def make_stack(
    config: T5Config, options: Options, *, decoder: bool, rngs: nnx.Rngs | None
) -> Stack:
    """Encoder, or decoder with cross-attention."""
    make = T5Layers(config, options, rngs)
    depth = config.decoder_layers if decoder else config.num_layers
    biases = depth if config.bias_per_layer else 1
    position_bias = [make.relative_bias(decoder=decoder) for _ in range(biases)]
    return Stack(
        [make.block(decoder=decoder) for _ in range(depth)],
        make.norm(),
        position_bias=position_bias,
        embedding_dropout=config.dropout_rate,
        output_dropout=config.dropout_rate,
        remat=options.remat,
        scan_layers=options.scan_layers,
    )
