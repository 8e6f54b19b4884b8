"""Base of Llama-like models with a mixture of experts: config fields, and weight table entries."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models.config import AuxLoss
from jaxllm.models.rotary_decoder import HF_LAYER, LAYER, RotaryConfig
from jaxllm.models.weights import Entry


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
        raise NotImplementedError

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


def expert_entries(router: str, gate: str, up: str, down: str) -> tuple[Entry, ...]:
    """Entries of a router and of stacked experts, by their tensors' names in a layer.

    An expert's name has ``{e}`` for its number: ``mlp.experts.{e}.up_proj``.
    """
    names = {"router": router, "expert_gate": gate, "expert_up": up, "expert_down": down}
    return tuple(
        Entry((f"{LAYER}.mlp.{ours}.weight",), f"{HF_LAYER}.{tensor}.weight")
        for ours, tensor in names.items()
    )
