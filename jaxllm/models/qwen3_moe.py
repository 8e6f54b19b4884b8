"""Qwen3 with a mixture of experts (Yang et al. 2025, arXiv:2505.09388), such as Qwen3-30B-A3B."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models import config_checks as checks
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.mixtral import RoutedConfig, expert_entries
from jaxllm.models.qwen3 import QWEN3_TABLE
from jaxllm.models.rotary_decoder import RotaryLayers, RotaryModel
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(RoutedConfig):
    """Qwen3-MoE config.

    Every `decoder_sparse_step`-th layer that is not among `mlp_only_layers` has experts of
    `moe_intermediate_size`, the others a dense layer of `intermediate_size`. `use_sliding_window`
    gives all layers the window `sliding_window`.
    """

    model_type = "qwen3_moe"
    unread = (
        *RoutedConfig.unread,
        *("use_sliding_window", "sliding_window", "decoder_sparse_step", "mlp_only_layers"),
    )
    attribute_map: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] | None = None
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False

    @property
    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def has_experts(self, layer: int) -> bool:
        """True if layer number `layer` has experts, not a dense feed-forward layer."""
        is_sparse = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
        return is_sparse and layer not in (self.mlp_only_layers or ())

    def check(self) -> None:
        super().check()
        if not 0 <= self.num_experts <= checks.MAX_SIZE:
            raise ConfigError(f"num_experts: expected 0 or more, found {quoted(self.num_experts)}")
        for layer in self.mlp_only_layers or ():
            if not 0 <= layer < self.num_hidden_layers:
                raise ConfigError(
                    f"mlp_only_layers: there is no layer {quoted(layer)}; num_hidden_layers is "
                    f"{self.num_hidden_layers}"
                )


class Qwen3MoeBackbone(RotaryModel[Qwen3MoeConfig]):
    """Qwen3-MoE backbone: Qwen3's attention, and experts in some or all layers."""

    def block(self, make: RotaryLayers, layer: int) -> Block:
        c = self.config
        attn = make.attention(normed_heads=True, window=c.window)
        if not c.has_experts(layer):
            return Block(make.norm(), attn, make.norm(), make.mlp())
        experts = make.experts(
            c.num_experts,
            c.moe_intermediate_size,
            top_k=c.num_experts_per_tok,
            normalized=c.norm_topk_prob,
        )
        return Block(make.norm(), attn, make.norm(), experts)


class Qwen3MoeModel(DecoderOnlyModel):
    backbone_class = Qwen3MoeBackbone


class Qwen3MoeForCausalLM(CausalLM):
    backbone_class = Qwen3MoeBackbone


class Qwen3MoeForSequenceClassification(SequenceClassifier):
    backbone_class = Qwen3MoeBackbone


QWEN3_MOE_TABLE = QWEN3_TABLE.with_entries(
    *expert_entries(
        "mlp.gate",
        gate="mlp.experts.{e}.gate_proj",
        up="mlp.experts.{e}.up_proj",
        down="mlp.experts.{e}.down_proj",
    )
)
