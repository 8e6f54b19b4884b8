"""T5's encoder: the base class of T5 models, and the encoder alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import make_view
from jaxllm.models import input_checks as check
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.model import BaseModel, Model, model_call
from jaxllm.models.outputs import BaseOutput, base_output
from jaxllm.models.t5.config import T5Config
from jaxllm.models.t5.stack import make_stack
from jaxllm.nn.blocks import Context
from jaxllm.nn.linear import Embedding
from jaxllm.nn.stack import Stack, StackOutput


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
