"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): Qwen2 with QK norm, without biases."""

from __future__ import annotations

import dataclasses

from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.qwen2 import Qwen2Config
from jaxllm.models.rotary_decoder import HEAD_NORMS, ROTARY_TABLE, RotaryLayers, RotaryModel
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen3 config: Qwen2's fields, and `attention_bias` for all four projections."""

    model_type = "qwen3"

    head_dim: int = 128
    attention_bias: bool = False


class Qwen3Backbone(RotaryModel[Qwen3Config]):
    """Qwen3 backbone: Llama's blocks with RMSNorm of each head's query and key (QK norm)."""

    def block(self, make: RotaryLayers, layer: int) -> Block:
        attn = make.attention(normed_heads=True, window=self.config.window(layer))
        return Block(make.norm(), attn, make.norm(), make.mlp())


class Qwen3Model(DecoderOnlyModel):
    backbone_class = Qwen3Backbone


class Qwen3ForCausalLM(CausalLM):
    backbone_class = Qwen3Backbone


class Qwen3ForSequenceClassification(SequenceClassifier):
    backbone_class = Qwen3Backbone


QWEN3_TABLE = ROTARY_TABLE.with_entries(*HEAD_NORMS)
