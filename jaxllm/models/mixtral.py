"""Mixtral (Jiang et al. 2024, arXiv:2401.04088), and what all families with experts share.

Mistral with a mixture of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models.config import AuxLoss
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.rotary_decoder import (
    HF_LAYER,
    LAYER,
    ROTARY_TABLE,
    RotaryConfig,
    RotaryLayers,
    RotaryModel,
)
from jaxllm.models.weights import Entry
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedConfig(RotaryConfig):
    """Config of a model whose routers send each token to `num_experts_per_tok` experts.

    With `output_router_logits`, transformers' name for it, `router_aux_loss_coef` times the loss of
    the routers is added to the loss of labels.
    """

    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001

    @property
    def expert_count(self) -> int:
        """Number of experts of a layer."""
        return self.value("experts", 0)

    @property
    def aux_loss(self) -> AuxLoss | None:
        if not self.output_router_logits:
            return None
        return AuxLoss(self.num_experts_per_tok, self.router_aux_loss_coef)

    def forward_values(self) -> dict[str, Any]:
        values = super().forward_values()
        return values if self.output_router_logits else values | {"router_aux_loss_coef": 0.0}

    def check(self) -> None:
        super().check()
        if 0 < self.expert_count < self.num_experts_per_tok:
            raise ConfigError(
                f"num_experts_per_tok: found {self.num_experts_per_tok}, but a layer has only "
                f"{self.expert_count} experts"
            )
        if self.router_aux_loss_coef < 0:
            found = quoted(self.router_aux_loss_coef)
            raise ConfigError(f"router_aux_loss_coef: expected 0 or more, found {found}")


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


def expert_entries(router: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Entries of a router and of stacked experts, by their tensors' names in a layer.

    An expert's name has ``{e}`` for its number: ``mlp.experts.{e}.up_proj``.
    """
    names = {"router": router, "expert_gate": gate, "expert_up": up, "expert_down": down}
    return tuple(
        Entry((f"{LAYER}.mlp.{ours}.weight",), f"{HF_LAYER}.{tensor}.weight")
        for ours, tensor in names.items()
    )


MIXTRAL_TABLE = ROTARY_TABLE.with_entries(
    *expert_entries(
        "block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{e}.w1",
        up="block_sparse_moe.experts.{e}.w3",
        down="block_sparse_moe.experts.{e}.w2",
    )
)
