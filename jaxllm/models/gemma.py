"""Gemma (Gemma Team 2024, arXiv:2403.08295), and what all versions of Gemma share.

Llama with scaled embeddings, norms that multiply by ``1 + weight``, and gated GELU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.rotary_decoder import RotaryConfig, RotaryLayers, RotaryModel
from jaxllm.nn.block import Block
from jaxllm.nn.linear import Embedding

TANH_GELU = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaFields(RotaryConfig):
    """Config fields of all versions of Gemma."""

    vocab_size: int = 256000
    head_dim: int | None = 256
    hidden_act: str = TANH_GELU
    max_position_embeddings: int = 8192
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {"use_bidirectional_attention": not self.is_causal}

    def check(self) -> None:
        super().check()
        if self.is_causal and self.use_bidirectional_attention:
            raise UnsupportedError(
                "use_bidirectional_attention: only causal attention is implemented, found true"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(GemmaFields):
    """Gemma config.

    The first files have `hidden_act` "gelu", which stands for the tanh approximation. Versions of
    transformers read either `hidden_act` or `hidden_activation`, so the two must agree.
    """

    model_type = "gemma"
    flax_reads_head_dim = True

    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act == "gelu":
            object.__setattr__(self, "hidden_act", TANH_GELU)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        config = super().from_dict({k: v for k, v in raw.items() if k != "hidden_activation"})
        other = raw.get("hidden_activation")
        if other not in (None, config.hidden_act):
            raise ConfigError(
                f"hidden_activation: {quoted(other)} contradicts hidden_act, "
                f"{quoted(config.hidden_act)}; set both to the activation of the model"
            )
        return config

    def flax_differences(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().flax_differences(raw)
        if raw.get("hidden_activation") is None and self.hidden_act != TANH_GELU:
            found["hidden_act"] = TANH_GELU
        return found

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw = super().to_json(model_type, architecture)
        return raw | {"hidden_activation": self.hidden_act}


class GemmaLayers(RotaryLayers):
    """Builds norms that multiply by ``1 + weight``, and scaled token embeddings."""

    unit_offset = True

    def tokens(self) -> Embedding:
        c = self.config
        return self.embedding(c.vocab_size, c.width, scale=c.width**0.5)


class GemmaBackbone(RotaryModel[GemmaConfig]):
    """Gemma backbone: Llama's blocks."""

    layers = GemmaLayers

    def block(self, make: RotaryLayers, layer: int) -> Block:
        return Block(make.norm(), make.attention(), make.norm(), make.mlp())


class GemmaModel(DecoderOnlyModel):
    backbone_class = GemmaBackbone


class GemmaForCausalLM(CausalLM):
    backbone_class = GemmaBackbone


class GemmaForSequenceClassification(SequenceClassifier):
    backbone_class = GemmaBackbone
