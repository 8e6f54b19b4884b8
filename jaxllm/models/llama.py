"""Llama (Touvron et al. 2023, arXiv:2302.13971), with all options of its config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.rotary_decoder import RotaryConfig, RotaryLayers, RotaryModel
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(RotaryConfig):
    """Llama config. `pretraining_tp` (splitting of matrix products) does not affect the result.

    >>> LlamaConfig.from_dict({"hidden_size": 64, "num_attention_heads": 4}).size_per_head
    16
    """

    model_type = "llama"
    unread = (*RotaryConfig.unread, "pretraining_tp")
    flax_constants: ClassVar[Mapping[str, Any]] = {"mlp_bias": False}

    vocab_size: int = 32000
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: int = 1


class LlamaBackbone(RotaryModel[LlamaConfig]):
    """Llama backbone: blocks of RMSNorm, grouped-query attention with RoPE, SwiGLU."""

    def block(self, make: RotaryLayers, layer: int) -> Block:
        return Block(make.norm(), make.attention(), make.norm(), make.mlp())


class LlamaModel(DecoderOnlyModel):
    backbone_class = LlamaBackbone


class LlamaForCausalLM(CausalLM):
    backbone_class = LlamaBackbone


class LlamaForSequenceClassification(SequenceClassifier):
    backbone_class = LlamaBackbone
