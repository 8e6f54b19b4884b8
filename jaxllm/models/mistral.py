"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with sliding-window attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.rotary_decoder import RotaryConfig, RotaryLayers, RotaryModel
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(RotaryConfig):
    """Mistral config. `sliding_window` None: full causal attention (7B v0.2)."""

    model_type = "mistral"
    unread = (*RotaryConfig.unread, "sliding_window")

    vocab_size: int = 32000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    sliding_window: int | None = 4096

    def flax_differences(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().flax_differences(raw)
        if self.sliding_window is None:
            found["sliding_window"] = 1  # each token attends to itself alone
        elif self.sliding_window < self.max_position_embeddings:
            found["sliding_window"] = self.sliding_window + 1
        return found


class MistralBackbone(RotaryModel[MistralConfig]):
    """Mistral backbone: Llama's blocks with sliding-window attention in every layer."""

    def block(self, make: RotaryLayers, layer: int) -> Block:
        attn = make.attention(window=self.config.sliding_window)
        return Block(make.norm(), attn, make.norm(), make.mlp())


class MistralModel(DecoderOnlyModel):
    backbone_class = MistralBackbone


class MistralForCausalLM(CausalLM):
    backbone_class = MistralBackbone


class MistralForSequenceClassification(SequenceClassifier):
    backbone_class = MistralBackbone
