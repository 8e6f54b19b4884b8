"""Phi-3, Phi-3.5 and Phi-4-mini (Microsoft 2024, arXiv:2404.14219 and arXiv:2503.01743).

Llama with fused projections, residual dropout, a window, and longrope RoPE on a part of each head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxllm.common.errors import ConfigError
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.mistral import MistralConfig
from jaxllm.models.rotary_decoder import HF_LAYER, LAYER, ROTARY_TABLE, RotaryLayers, RotaryModel
from jaxllm.models.weights import Table, linear
from jaxllm.nn.block import Block
from jaxllm.nn.rope import Rope

ORIGINAL = "original_max_position_embeddings"
ORIGINAL_POSITIONS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(MistralConfig):
    """Phi-3 config. `embd_pdrop` has no effect, as in transformers; `auto_map` names other code."""

    model_type = "phi3"
    no_effect: ClassVar[Mapping[str, Any]] = {  # in Phi-4-mini's files
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
    }
    partial_rotary: ClassVar[bool] = True

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | tuple[int, ...] | None = 32000
    pad_token_id: int | None = 32000
    resid_pdrop: float = 0.0
    sliding_window: int | None = None

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        return super().handled_keys(raw) | {"auto_map"}

    def read_rope(self, raw: Mapping[str, Any]) -> Rope:
        # The original context has this default, whatever the context is.
        raw = {**raw, ORIGINAL: raw.get(ORIGINAL) or ORIGINAL_POSITIONS}
        for field in ("rope_scaling", "rope_parameters"):
            if isinstance(rope := raw.get(field), Mapping):
                raw[field] = {key: _new_name(value) for key, value in rope.items()}
        rope = super().read_rope(raw)
        if rope.rope_type not in ("default", "longrope"):
            raise ConfigError(f"rope_type: expected default or longrope, found {rope.rope_type}")
        return rope

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw, rope = super().to_json(model_type, architecture), self.rotary
        raw[ORIGINAL], scaling = rope.original_positions, raw["rope_scaling"]
        if scaling:  # transformers 4 takes `type`, and these numbers from the top level
            del scaling[ORIGINAL]
            scaling["type"] = scaling.pop("rope_type")
            if rope.factor == self.max_position_embeddings / rope.original_positions:
                del scaling["factor"]
        return raw


def _new_name(value: Any) -> Any:
    """The name of a RoPE type in place of an old one; other values as they are."""
    return "longrope" if value in ("su", "yarn") else value


class Phi3Backbone(RotaryModel[Phi3Config]):
    """Phi-3 backbone: Llama's blocks with dropout after each sublayer."""

    def block(self, make: RotaryLayers, layer: int) -> Block:
        attn = make.attention(window=self.config.sliding_window)
        dropout = self.config.resid_pdrop
        return Block(make.norm(), attn, make.norm(), make.mlp(), dropout_rate=dropout)


class Phi3Model(DecoderOnlyModel):
    backbone_class = Phi3Backbone


class Phi3ForCausalLM(CausalLM):
    backbone_class = Phi3Backbone


class Phi3ForSequenceClassification(SequenceClassifier):
    backbone_class = Phi3Backbone


def phi3_table(config: Phi3Config) -> Table:
    """Llama's table with fused projections, whose rows depend on the numbers of heads."""
    heads = (config.num_attention_heads, config.kv_heads, config.kv_heads)
    qkv = tuple(f"{LAYER}.attn.{name}" for name in "qkv")
    rows = tuple(count * config.size_per_head for count in heads)
    return ROTARY_TABLE.with_entries(
        *linear(qkv, f"{HF_LAYER}.self_attn.qkv_proj", rows=rows),
        *linear((f"{LAYER}.mlp.gate", f"{LAYER}.mlp.up"), f"{HF_LAYER}.mlp.gate_up_proj"),
    )
