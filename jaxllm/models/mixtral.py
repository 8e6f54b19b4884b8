"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel
from jaxllm.models.rotary_decoder import ROTARY_TABLE, RotaryLayers, RotaryModel
from jaxllm.models.routed_decoder import RoutedConfig, expert_entries
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(RoutedConfig):
    """Mixtral config. `sliding_window` None: full causal attention. `router_jitter_noise` acts in
    training."""

    model_type = "mixtral"
    unread = (*RoutedConfig.unread, "sliding_window", "router_jitter_noise")
    attribute_map: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
    default_theta: ClassVar[float] = 1e6

    vocab_size: int = 32000
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    sliding_window: int | None = None
    num_local_experts: int = 8
    router_jitter_noise: float = 0.0

    @property
    def expert_count(self) -> int:
        return self.num_local_experts


class MixtralBackbone(RotaryModel[MixtralConfig]):
    """Mixtral backbone: Mistral's blocks with experts, whose weights in the sum add up to 1."""

    def block(self, make: RotaryLayers, layer: int) -> Block:
        c = self.config
        experts = make.experts(
            c.num_local_experts,
            c.intermediate_size,
            top_k=c.num_experts_per_tok,
            keeps_float32=True,
            jitter=c.router_jitter_noise,
        )
        return Block(make.norm(), make.attention(window=c.sliding_window), make.norm(), experts)


class MixtralModel(DecoderOnlyModel):
    backbone_class = MixtralBackbone


class MixtralForCausalLM(CausalLM):
    backbone_class = MixtralBackbone


class MixtralForSequenceClassification(SequenceClassifier):
    backbone_class = MixtralBackbone


MIXTRAL_TABLE = ROTARY_TABLE.with_entries(
    *expert_entries(
        "block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{e}.w1",
        up="block_sparse_moe.experts.{e}.w3",
        down="block_sparse_moe.experts.{e}.w2",
    )
)
