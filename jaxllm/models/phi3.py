"""Phi-3, Phi-3.5 and Phi-4-mini (Microsoft 2024, arXiv:2404.14219 and arXiv:2503.01743).

Llama with fused projections, residual dropout, a window, and LongRoPE on a part of each head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.cache.attention_view import AttentionView
from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models import config_checks as checks
from jaxllm.models import rotary_decoder as base
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel
from jaxllm.models.mistral import MistralConfig
from jaxllm.models.weights import Table, linear
from jaxllm.nn.block import Block
from jaxllm.nn.rope import Rope, rope_from_config

PART, LENGTH = "partial_rotary_factor", "original_max_position_embeddings"
# Keys of Phi-4-mini that change nothing with these values.
OFF = (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(MistralConfig):
    """Phi-3 config. `embd_pdrop` and `auto_map` (other code) have no effect, as in transformers.

    RoPE rotates the first ``int(head_dim * partial_rotary_factor)`` features of each head.
    """

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
    partial_rotary_factor: float = 1.0

    @property
    def model_type(self) -> str:
        return "phi3"

    @property
    def rotated(self) -> int:
        return int(self.size_per_head * self.partial_rotary_factor)

    @property
    def rotary(self) -> Rope:
        rope = self.rope or Rope(self.rotated, original_positions=4096)
        if rope.head_dim != self.rotated:
            raise ConfigError(f"rope: for {rope.head_dim} features, not {self.rotated}")
        return rope

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        plain = {k: v for k, v in raw.items() if k != "auto_map" and (k, v) not in OFF}
        rope: dict[str, Any] = {LENGTH: 4096}  # the default, whatever the context is
        rope |= {k: v for k in base.ROPE_KEYS if (v := plain.pop(k, None)) is not None}
        nested = {k: dict(v) for k, v in rope.items() if isinstance(v, Mapping)}
        parts = [v for x in (rope, *nested.values()) if (v := x.pop(PART, None)) is not None]
        if any(part != parts[0] for part in parts):
            raise ConfigError(f"{PART}: {' contradicts '.join(map(quoted, parts))}")
        config = dataclasses.replace(super().from_dict(plain), **{PART: (*parts, 1.0)[0]})
        config.check()
        for field, values in nested.items():  # "su" and "yarn" are old names
            rope[field] = {k: "longrope" if v in ("su", "yarn") else v for k, v in values.items()}
        sizes = {"head_dim": config.rotated, "max_positions": config.max_position_embeddings}
        rotary = rope_from_config(rope, **sizes)
        if rotary.rope_type not in ("default", "longrope"):
            raise ConfigError(f"rope_type: expected default or longrope, found {rotary.rope_type}")
        return dataclasses.replace(config, rope=rotary)

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw, rope = super().to_json(model_type, architecture), self.rotary
        raw[LENGTH], scaling = rope.original_positions, raw["rope_scaling"]
        if scaling:  # transformers 4 takes these names, and `factor` from the two lengths
            scaling |= {"type": scaling.pop("rope_type"), LENGTH: None}
            if rope.factor == self.max_position_embeddings / rope.original_positions:
                scaling["factor"] = None
            raw["rope_scaling"] = {k: v for k, v in scaling.items() if v is not None}
        return raw

    def check(self) -> None:
        super().check()
        checks.check_rate(self, "resid_pdrop")
        part, size = self.partial_rotary_factor, self.size_per_head
        if not 0 < part <= 1 or size % 2 or self.rotated % 2 or not self.rotated:
            raise ConfigError(f"{PART}: expected an even part of head_dim, {size}: found {part}")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Order of features in which the pairs of `rotate`, i and i + H/2, are i and i + rotated/2."""

    rotated: int

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        first, second, rest = jnp.split(x, (self.rotated // 2, self.rotated), axis=-1)
        between, last = jnp.split(rest, 2, axis=-1)
        return jnp.concatenate([first, between, second, last], axis=-1)


class Phi3Backbone(base.RotaryModel[Phi3Config]):
    """Phi-3 backbone: Llama's blocks with dropout, and RoPE on a part of each head."""

    def block(self, make: base.LayerFactory, layer: int) -> Block:
        c, attn = self.config, make.attention(window=self.config.sliding_window)
        if c.rotated < c.size_per_head:
            attn.q_norm = attn.k_norm = Spread(c.rotated)
        return Block(make.norm(), attn, make.norm(), make.mlp(), dropout_rate=c.resid_pdrop)

    def rotary(self, view: AttentionView) -> tuple[Array, Array] | None:
        angles, c = super().rotary(view), self.config
        assert angles is not None
        pad, spread = [(0, 0)] * 3 + [(0, c.size_per_head - c.rotated)], Spread(c.rotated)
        return spread(jnp.pad(angles[0], pad, constant_values=1)), spread(jnp.pad(angles[1], pad))


class Phi3Model(DecoderOnlyModel):
    backbone_class = Phi3Backbone


class Phi3ForCausalLM(CausalLM):
    backbone_class = Phi3Backbone


class Phi3ForSequenceClassification(SequenceClassifier):
    backbone_class = Phi3Backbone


def phi3_table(c: Phi3Config) -> Table:
    """Llama's table with fused projections, whose rows depend on the numbers of heads."""
    rows = tuple(n * c.size_per_head for n in (c.num_attention_heads, c.kv_heads, c.kv_heads))
    qkv = tuple(f"{base.LAYER}.attn.{x}" for x in "qkv")
    gate_up = (f"{base.LAYER}.mlp.gate", f"{base.LAYER}.mlp.up")
    return base.ROTARY_TABLE.with_entries(
        *linear(qkv, f"{base.HF_LAYER}.self_attn.qkv_proj", rows=rows),
        *linear(gate_up, f"{base.HF_LAYER}.mlp.gate_up_proj"),
    )
