"""BLOOM (BigScience 2022, arXiv:2211.05100) and BLOOMZ (arXiv:2211.01786).

GPT-2 with ALiBi in place of positions, and a norm of the token embeddings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.common.errors import UnsupportedError
from jaxllm.models.backbone import Backbone, LayerFactory
from jaxllm.models.build_options import Options
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.gpt2 import GPT_TABLE, HF_LAYER, LAYER, LayerNormConfig
from jaxllm.models.weights import Table, linear, norm, same
from jaxllm.nn.block import Block
from jaxllm.nn.positions import Alibi

TRAINING = ("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion")
UNUSED = frozenset({*TRAINING, "offset_alibi", "skip_bias_add", "skip_bias_add_qkv"})
"""Keys of the training code, which published files have and transformers does not read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BloomConfig(LayerNormConfig):
    """BLOOM config, with the field names of config.json.

    `pretraining_tp` has no effect without `slow_but_exact`, with which it is refused.
    `seq_length` is the length of texts in training.
    """

    model_type = "bloom"
    unread = (*LayerNormConfig.unread, "pretraining_tp", "slow_but_exact", "seq_length")
    attribute_map: ClassVar[Mapping[str, str]] = {
        "n_embed": "hidden_size",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 250880
    hidden_size: int = 64
    n_layer: int = 2
    n_head: int = 8
    layer_norm_epsilon: float = 1e-5
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    apply_residual_connection_post_layernorm: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    pretraining_tp: int = 1
    slow_but_exact: bool = False
    seq_length: int | None = None

    @property
    def context_length(self) -> int | None:
        return self.seq_length

    @property
    def longest_prompt(self) -> None:  # ALiBi is for longer texts than those in training
        return None

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        return super().handled_keys(raw) | UNUSED

    def check(self) -> None:
        super().check()
        if self.slow_but_exact and self.pretraining_tp > 1:
            raise UnsupportedError(
                "slow_but_exact: with pretraining_tp above 1 transformers leaves out biases, found "
                "true; set it to false"
            )


class BloomBackbone(Backbone[BloomConfig]):
    """BLOOM backbone: ALiBi, and LayerNorm with biases, of the token embeddings too."""

    takes_position_ids = False

    def __init__(self, config: BloomConfig, options: Options, *, rngs: nnx.Rngs | None):
        super().__init__(config, options, rngs=rngs)
        self.embed_norm = LayerFactory(config, options, rngs).norm()

    def block(self, make: LayerFactory, layer: int) -> Block:
        c, parts = self.config, (make.norm(), make.attention(), make.norm(), make.mlp())
        adds_to_norm = c.apply_residual_connection_post_layernorm
        return Block(*parts, adds_to_norm=adds_to_norm, dropout_rate=c.hidden_dropout)

    def position_bias(self, make: LayerFactory) -> list[Alibi]:
        return [Alibi(self.config.n_head)]

    def block_input(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.embed_norm(x)


class BloomModel(DecoderOnlyModel):
    backbone_class = BloomBackbone


class BloomForCausalLM(CausalLM):
    backbone_class = BloomBackbone


class BloomForSequenceClassification(SequenceClassifier):
    backbone_class = BloomBackbone


QKV = tuple(f"{LAYER}.attn.{x}" for x in "qkv")


def bloom_table(config: BloomConfig) -> Table:
    """Weight table. The fused tensor of q, k and v has the three of the first head first."""
    rows = np.arange(3 * config.hidden_size).reshape(config.n_head, 3, -1)
    order = tuple(rows.swapaxes(0, 1).flatten().tolist())
    return GPT_TABLE.with_entries(
        *same("backbone.embed.weight", "transformer.word_embeddings.weight"),
        *norm("backbone.embed_norm", "transformer.word_embeddings_layernorm", bias=True),
        *norm(f"{LAYER}.attn_norm", f"{HF_LAYER}.input_layernorm", bias=True),
        *linear(QKV, f"{HF_LAYER}.self_attention.query_key_value", order=order),
        *linear(f"{LAYER}.attn.o", f"{HF_LAYER}.self_attention.dense"),
        *norm(f"{LAYER}.mlp_norm", f"{HF_LAYER}.post_attention_layernorm", bias=True),
        *linear(f"{LAYER}.mlp.up", f"{HF_LAYER}.mlp.dense_h_to_4h"),
        *linear(f"{LAYER}.mlp.down", f"{HF_LAYER}.mlp.dense_4h_to_h"),
    )
