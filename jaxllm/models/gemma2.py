"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118).

Llama with scaled embeddings, norms before and after each sublayer that multiply by ``1 + weight``,
soft caps on scores and logits, and sliding-window attention in every other layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxllm.models import config_checks as checks
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.gemma import GemmaFields, GemmaLayers
from jaxllm.models.rotary_decoder import HF_LAYER, LAYER, ROTARY_TABLE, RotaryModel
from jaxllm.models.weights import norm
from jaxllm.nn.attention import Attention, Scores
from jaxllm.nn.block import Block
from jaxllm.nn.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaFields):
    """Gemma 2 config.

    Layers of type "sliding_attention" have the window `sliding_window`: by default the first layer
    and then every other one. `hidden_act`, which old files have too, is not read.
    """

    model_type = "gemma2"
    written_names: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    # Sliding layers keep their window only. It saves memory and changes no result.
    no_effect: ClassVar[Mapping[str, Any]] = {"cache_implementation": "hybrid"}
    unread = (
        *GemmaFields.unread,
        *("sliding_window", "layer_types", "attn_logit_softcapping", "query_pre_attn_scalar"),
    )
    attribute_map: ClassVar[Mapping[str, str]] = {"hidden_activation": "hidden_act"}

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    query_pre_attn_scalar: int = 256
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = 30.0
    attn_logit_softcapping: float | None = 50.0

    @property
    def logit_softcap(self) -> float | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.final_logit_softcapping

    def window(self, layer: int) -> int | None:
        """Attention window of this layer in tokens, the query's own included; None: no window."""
        return self.sliding_window if self.slides(layer) else None

    def slides(self, layer: int) -> bool:
        """True if this layer is of the type that has a window."""
        types = self.layer_types
        return layer % 2 == 0 if types is None else types[layer] == checks.SLIDING

    def rope_of(self, layer: int) -> Rope | None:
        """RoPE of this layer; None: that of the config."""
        return None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        activation = raw.get("hidden_activation")
        activation = cls.hidden_act if activation is None else activation
        return super().from_dict({**raw, "hidden_act": None, "hidden_activation": activation})

    def check(self) -> None:
        super().check()
        checks.check_layer_types(self.layer_types, self.num_hidden_layers)


class Gemma2Layers(GemmaLayers):
    """Builds attention with the scores of the config, and norms on both sides of each sublayer."""

    @property
    def scores(self) -> Scores:
        c = self.config
        return Scores(c.query_pre_attn_scalar**-0.5, c.attn_logit_softcapping)

    def block(self, attn: Attention, cross: Attention | None = None, **options: Any) -> Block:
        """Block with these attention layers; `options` are those of `Block`."""
        norms = ["attn", "mlp"] if cross is None else ["attn", "mlp", "cross"]
        options |= {f"{name}_post_norm": self.norm() for name in norms}
        cross_norm = None if cross is None else self.norm()
        return Block(self.norm(), attn, self.norm(), self.mlp(), cross_norm, cross, **options)


class Gemma2Backbone(RotaryModel[Gemma2Config]):
    """Gemma 2 backbone: blocks with norms on both sides of attention and feed-forward layers."""

    layers = Gemma2Layers
    normed_heads = False

    def block(self, make: Gemma2Layers, layer: int) -> Block:
        options = {"window": self.config.window(layer), "rope": self.config.rope_of(layer)}
        return make.block(make.attention(normed_heads=self.normed_heads, **options))


class Gemma2Model(DecoderOnlyModel):
    backbone_class = Gemma2Backbone


class Gemma2ForCausalLM(CausalLM):
    backbone_class = Gemma2Backbone


class Gemma2ForSequenceClassification(SequenceClassifier):
    backbone_class = Gemma2Backbone


GEMMA2_TABLE = ROTARY_TABLE.with_entries(
    *norm(f"{LAYER}.attn_post_norm", f"{HF_LAYER}.post_attention_layernorm"),
    *norm(f"{LAYER}.mlp_norm", f"{HF_LAYER}.pre_feedforward_layernorm"),
    *norm(f"{LAYER}.mlp_post_norm", f"{HF_LAYER}.post_feedforward_layernorm"),
)
