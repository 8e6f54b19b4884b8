"""Sequence classification with a decoder-only model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxllm.common.errors import InputError
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.config import DecoderOnlyConfig
from jaxllm.models.decoder_only import DecoderOnly
from jaxllm.models.losses import classification_loss
from jaxllm.models.model import model_call, take_column
from jaxllm.models.outputs import SequenceClassifierOutput
from jaxllm.nn.linear import Linear, split_key


class SequenceClassifier(DecoderOnly):
    """Backbone and a linear head on each row's last real token, with left or right padding."""

    config_reads = ("pad_token_id", "num_labels", "problem_type")

    score: Linear

    def __init__(
        self, config: DecoderOnlyConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None
    ):
        super().__init__(config, options, rngs=rngs)
        sizes, std = (config.width, config.num_labels), config.initializer_range
        self.score = Linear(*sizes, std=std, rngs=rngs, **options.dtypes)

    @model_call
    def __call__(
        self,
        input_ids: Int[Array, "B T"] | None = None,
        attention_mask: Int[Array, "B T"] | None = None,
        *,
        labels: Array | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput:
        """Class `logits` [B, C]; with `labels` also the loss of the config's `problem_type`.

        The last real token is the last one in the mask; without a mask the last that is not
        `pad_token_id`, as in transformers. `options` are those of `CausalLM`, except
        `logits_to_keep`, `cache` and `segment_ids`.
        """
        if options.get("cache") is not None:
            raise InputError("cache: a classifier reads its sequence in one call")
        if options.get("segment_ids") is not None:
            raise InputError("segment_ids: a classifier reads one sequence a row")
        key, head_key = split_key(options.pop("dropout_key", None), 2)
        out = self.hidden(input_ids, attention_mask, dropout_key=key, **options)
        x = out.last_hidden_state
        columns = jnp.arange(x.shape[1])
        if attention_mask is not None:
            real = jnp.asarray(attention_mask).astype(bool)
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = jnp.asarray(input_ids) != self.config.pad_token_id
        elif input_ids is not None and x.shape[0] > 1:
            raise InputError(
                "attention_mask: needed for a batch, since the config has no pad_token_id"
            )
        else:
            real = jnp.ones(x.shape[:2], bool)
        last = jnp.max(jnp.where(real, columns, 0), axis=-1)
        logits = self.score(take_column(x, last), head_key)[:, 0].astype(jnp.float32)
        loss = None
        if labels is not None:
            loss = classification_loss(logits, labels, self.config.problem_type)
        return SequenceClassifierOutput(
            logits=logits, loss=loss, hidden_states=out.hidden_states, attentions=out.attentions
        )
