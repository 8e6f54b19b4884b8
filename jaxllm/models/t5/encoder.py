"""T5's stacks of blocks, and its encoder: the base class of T5 models, and the encoder alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import make_view
from jaxllm.models import input_checks as check
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.model import BaseModel, Model, base_output, model_call
from jaxllm.models.outputs import BaseOutput
from jaxllm.models.t5.config import T5Config
from jaxllm.nn.attention import Attention, Scores
from jaxllm.nn.block import Block, Context, Stack, StackOutput
from jaxllm.nn.linear import Embedding, Linear, RMSNorm
from jaxllm.nn.mlp import MLP, GatedMLP, activation
from jaxllm.nn.relative_bias import RelativeBias


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
            scores=Scores(1.0),
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
        **options.stack,
    )


class T5Encoder(Model[T5Config]):
    """Base class of T5 models: shared embedding and encoder."""

    shared: Embedding
    encoder: Stack

    def __init__(self, config: T5Config, options: Options, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        self.shared = Embedding(
            config.vocab_size,
            config.d_model,
            std=config.initializer_factor,
            rngs=rngs,
            **options.dtypes,
        )
        self.encoder = make_stack(config, options, decoder=False, rngs=rngs)

    @property
    def embedding(self) -> Embedding:
        return self.shared

    def encode(
        self,
        input_ids: Int[Array, "B E"] | None,
        attention_mask: Bool[Array, "B E"] | Int[Array, "B E"] | None = None,
        *,
        inputs_embeds: Float[Array, "B E D"] | None = None,
        segments: Int[Array, "B E"] | None = None,
        **options: Any,
    ) -> StackOutput:
        """Runs the encoder on arrays, whose values are not checked; without a mask all columns are
        real tokens."""
        x = self.shared.from_ids_or_embeds(input_ids, inputs_embeds)
        ones = jnp.ones(x.shape[:2], bool)
        mask = ones if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        view = make_view(mask, causal=False, segments=segments)
        return self.encoder(x, Context(view=view), **options)

    def inputs(self, *arrays: Any, side: str = "") -> check.SequenceInputs:
        """Checks token ids, embeddings, mask and segment ids of the encoder or the decoder."""
        sizes = {"vocab_size": self.config.vocab_size, "width": self.config.d_model}
        return check.sequence_inputs(*arrays, **sizes, side=side)

    def head_mask(self, name: str, mask: object, stack: Stack) -> Float[Array, "L N"] | None:
        return check.head_mask(name, mask, len(stack.blocks), self.config.num_heads)


class T5EncoderModel(T5Encoder, BaseModel[T5Config]):
    """T5 encoder only, for embeddings of sequences."""

    def __init__(self, config: T5Config, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config, options, rngs=rngs)

    @model_call
    def __call__(
        self,
        input_ids: Int[Array, "B E"] | None = None,
        attention_mask: Int[Array, "B E"] | None = None,
        *,
        inputs_embeds: Float[Array, "B E D"] | None = None,
        segment_ids: Int[Array, "B E"] | None = None,
        head_mask: Float[Array, "L N"] | None = None,
        dropout_key: Array | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BaseOutput:
        """Runs the encoder: `last_hidden_state` [B, E, D].

        `attention_mask` is 1 at real tokens; pads may be anywhere. For packed rows pass
        `segment_ids` instead (0 at pads, a document's number from 1 elsewhere).
        """
        inputs = self.inputs(input_ids, inputs_embeds, attention_mask, segment_ids)
        out = self.encode(
            inputs.input_ids,
            inputs.mask,
            inputs_embeds=inputs.inputs_embeds,
            segments=inputs.segments,
            head_mask=self.head_mask("head_mask", head_mask, self.encoder),
            key=dropout_key,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return base_output(out)
