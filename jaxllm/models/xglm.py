"""XGLM (Lin et al. 2021, arXiv:2112.10668): a multilingual decoder-only model.

GPT-2 with sinusoidal positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array

from jaxllm.models.absolute_encoder_decoder import (
    FairseqLayers,
    check_sinusoids,
    refuse_layerdrop,
    sinusoid_tables,
)
from jaxllm.models.backbone import Backbone
from jaxllm.models.config import DecoderOnlyConfig
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel
from jaxllm.models.gpt2 import LAYER, LayerNormConfig
from jaxllm.models.outputs import BaseOutput
from jaxllm.models.weights import Table, attention_and_mlp, norm, same
from jaxllm.nn.block import Block
from jaxllm.nn.positions import Sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class XGLMConfig(LayerNormConfig):
    """XGLM config, with the names of config.json; `init_std` there is `initializer_range` here."""

    model_type = "xglm"
    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "init_std": "initializer_range",
        "num_attention_heads": "attention_heads",
        "num_hidden_layers": "num_layers",
    }
    written_names: ClassVar[Mapping[str, str]] = {"initializer_range": "init_std"}
    unread = (*LayerNormConfig.unread, "max_position_embeddings")
    flax_constants: ClassVar[Mapping[str, Any]] = {"pad_token_id": 1}
    absent_tokens = DecoderOnlyConfig.absent_tokens

    vocab_size: int = 256008
    max_position_embeddings: int = 2048
    d_model: int = 1024
    ffn_dim: int = 4096
    num_layers: int = 24
    attention_heads: int = 16
    activation_function: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.0
    layerdrop: float = 0.0
    scale_embedding: bool = True
    add_cross_attention: bool = False
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    decoder_start_token_id: int | None = 2

    @property
    def sinusoids(self) -> Sinusoids:
        return Sinusoids(self.d_model, steps=self.d_model // 2 - 1, zero_row=self.pad_token_id)

    @property
    def max_positions(self) -> None:  # a longer text has further positions
        return None

    @property
    def longest_prompt(self) -> None:
        return None

    @property
    def embedding_dropout(self) -> float:
        return self.dropout

    def check(self) -> None:
        super().check()
        check_sinusoids(self.d_model)


class XGLMBackbone(Backbone[XGLMConfig]):
    """XGLM backbone: sinusoidal positions, pre-norm blocks with LayerNorm, biases and GELU."""

    layers = FairseqLayers
    position_offset = 2

    def position_table(self, make: FairseqLayers) -> Sinusoids:
        return self.config.sinusoids

    def block(self, make: FairseqLayers, layer: int) -> Block:
        c = self.config
        return make.plain_block(cross=c.add_cross_attention, dropout_rate=c.dropout)


class XGLMModel(DecoderOnlyModel):
    backbone_class = XGLMBackbone


class XGLMForCausalLM(CausalLM):
    backbone_class = XGLMBackbone
    config_reads = ("pad_token_id",)

    def hidden(self, *args: Any, dropout_key: Array | None = None, **options: Any) -> BaseOutput:
        refuse_layerdrop(self.config, ("layerdrop",), dropout_key)
        return super().hidden(*args, dropout_key=dropout_key, **options)


def xglm_table(config: XGLMConfig) -> Table:
    """Weight table of XGLM, whose old files hold its positions."""
    parts = {"attn": "self_attn", "cross": "encoder_attn"}
    return Table(
        (
            *same("backbone.embed.weight", "model.embed_tokens.weight"),
            *attention_and_mlp(LAYER, "model.layers.{i}", parts),
            *norm("backbone.stack.norm", "model.layer_norm", bias=True),
            *same("lm_head.weight", "lm_head.weight"),
        ),
        prefix="model.",
        copies=((r"lm_head\.weight", "backbone.embed.weight"),),
        constants=sinusoid_tables(config.sinusoids),
    )
