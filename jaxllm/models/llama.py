"""Llama (Touvron et al. 2023, arXiv:2302.13971), with all options of its config.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.models import config_checks as checks
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel
from jaxllm.models.rotary_decoder import LayerFactory, RotaryConfig, RotaryModel
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """Llama config. `pretraining_tp` (splitting of matrix products) does not affect the result.

    >>> LlamaConfig.from_dict({"hidden_size": 64, "num_attention_heads": 4}).size_per_head
    16
    """

    vocab_size: int = 32000
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: int = 1

    @property
    def model_type(self) -> str:
        return "llama"

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {"pretraining_tp": 0}

    def check(self) -> None:
        super().check()
        checks.check_size(self, "pretraining_tp")


class LlamaBackbone(RotaryModel[LlamaConfig]):
    """Llama backbone: blocks of RMSNorm, grouped-query attention with RoPE, SwiGLU."""

    def block(self, make: LayerFactory, layer: int) -> Block:
        c = self.config
        attn = make.attention(bias=c.attention_bias, output_bias=c.attention_bias)
        return Block(make.norm(), attn, make.norm(), make.mlp(bias=c.mlp_bias))


class LlamaModel(DecoderOnlyModel):
    backbone_class = LlamaBackbone


class LlamaForCausalLM(CausalLM):
    backbone_class = LlamaBackbone


class LlamaForSequenceClassification(SequenceClassifier):
    backbone_class = LlamaBackbone
