"""Base of Llama-like models: a config with RoPE, and a backbone of pre-norm blocks.

A family adds its own config fields and defines its transformer block in `block`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from jaxllm.common.errors import ConfigError, UnsupportedError
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.backbone import Backbone, LayerFactory
from jaxllm.models.weights import Table, linear, norm, same
from jaxllm.nn.experts import ExpertLinear, MixtureOfExperts, Router
from jaxllm.nn.linear import RMSNorm
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.rope import Rope, rope_from_config, rope_to_config, without_unused

ROPE_KEYS = frozenset(
    {
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryConfig(cfg.DecoderOnlyConfig):
    """Config with the field names of config.json; all RoPE fields are merged into `rope`.

    `max_position_embeddings` affects RoPE (dynamic scaling) and is generate()'s default limit.
    `rope` None: RoPE without scaling, of base `default_theta`.
    """

    partial_rotary: ClassVar[bool] = False
    """True if the family may rotate a part of each head (`partial_rotary_factor`)."""
    derived: ClassVar[frozenset[str]] = frozenset({"rope"})
    default_theta: ClassVar[float] = 10000.0
    """Base of RoPE if the file has none."""
    flax_reads_head_dim: ClassVar[bool] = False
    """True if transformers' Flax class reads `head_dim`."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    attention_dropout: float = 0.0
    rope: Rope | None = None

    @property
    def rotary(self) -> Rope:
        rope = self.rope or self.read_rope({})
        if rope.head_dim != self.size_per_head:
            raise ConfigError(f"rope: for head_dim {rope.head_dim}, not {self.size_per_head}")
        return rope

    @property
    def head_counts(self) -> dict[str, int]:
        return super().head_counts | {"num_key_value_heads": self.kv_heads}

    @property
    def longest_prompt(self) -> int | None:
        # Dynamic scaling is for prompts that are longer than the context.
        return None if self.rotary.rope_type == "dynamic" else self.context_length

    def forward_values(self) -> dict[str, Any]:
        is_dynamic = self.rotary.rope_type == "dynamic"
        return super().forward_values() | {
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.size_per_head,
            "max_position_embeddings": self.max_position_embeddings if is_dynamic else 0,
            "rope": without_unused(self.rotary),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        config = super().from_dict(raw)
        rope = config.read_rope(raw)
        if rope.partial_rotary_factor != 1 and not cls.partial_rotary:
            raise UnsupportedError(
                f"partial_rotary_factor: found {rope.partial_rotary_factor}; a "
                f"{config.model_type} model rotates all features of a head"
            )
        return dataclasses.replace(config, rope=rope)

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        # Files converted from Qwen2 to any of these families keep its window's keys, switched off.
        handled = ROPE_KEYS
        if raw.get("use_sliding_window") is False:
            handled |= {"use_sliding_window", "sliding_window", "max_window_layers"}
        elif not (
            raw.get("use_sliding_window")
            or raw.get("sliding_window", getattr(cls, "sliding_window", None))
        ):
            handled |= {"max_window_layers"}
            types = raw.get("layer_types")
            if isinstance(types, list) and all(name == "full_attention" for name in types):
                handled |= {"layer_types"}
        if raw.get("position_embedding_type") in ("rope", "rotary"):  # as these families have it
            handled |= {"position_embedding_type"}
        return super().handled_keys(raw) | handled

    def read_rope(self, raw: Mapping[str, Any]) -> Rope:
        """Reads the RoPE fields of a config.json object, whose other fields are read."""
        sizes = {"head_dim": self.size_per_head, "max_positions": self.max_position_embeddings}
        return rope_from_config(raw, default_theta=self.default_theta, **sizes)

    def flax_differences(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().flax_differences(raw)
        if self.rotary.theta != 10000:
            found["rope_theta"] = 10000.0
        if self.rotary.rope_type != "default":
            found["rope_scaling"] = None
        own_size = self.hidden_size // self.num_attention_heads
        if self.size_per_head != own_size and not self.flax_reads_head_dim:
            found["head_dim"] = own_size
        return found

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw = super().to_json(model_type, architecture)
        del raw["rope"]
        if raw["head_dim"] is None:  # transformers takes null for a value
            del raw["head_dim"]
        return raw | rope_to_config(self.rotary)

    def check(self) -> None:
        super().check()
        if self.head_dim is None:
            checks.check_divides(self, "hidden_size", "num_attention_heads")
        if self.num_attention_heads % self.kv_heads:
            raise ConfigError(
                f"num_key_value_heads: {self.kv_heads} does not divide num_attention_heads, "
                f"{self.num_attention_heads}"
            )


C = TypeVar("C", bound=RotaryConfig)


class RotaryLayers(LayerFactory):
    """Builds RMSNorm, attention with RoPE and gated feed-forward layers, without biases."""

    has_biases = False
    unit_offset: ClassVar[bool] = False
    """True: norms multiply by ``1 + weight`` (`RMSNorm`)."""

    @property
    def rope(self) -> Rope:
        return self.config.rotary

    def norm(self, size: int | None = None) -> RMSNorm:
        c = self.config
        options = {"eps": c.rms_norm_eps, "unit_offset": self.unit_offset, **self.options.dtypes}
        return RMSNorm(size or c.hidden, **options)

    def mlp(self) -> GatedMLP:
        hidden, inner = self.config.hidden, self.inner
        bias = self.config.value("mlp_bias", default=False)
        return GatedMLP(
            gate=self.linear(hidden, inner, bias=bias),
            up=self.linear(hidden, inner, bias=bias),
            down=self.linear(inner, hidden, bias=bias),
            act=self.activation(),
        )

    def experts(
        self,
        count: int,
        size: int,
        *,
        top_k: int,
        normalized: bool = True,
        keeps_float32: bool = False,
        jitter: float = 0.0,
    ) -> MixtureOfExperts:
        """`count` feed-forward layers of `size` features, of which a router chooses `top_k` for
        each token; for the options see `Router` and `MixtureOfExperts`."""
        c = self.config
        made = {"std": c.initializer_range, "rngs": self.rngs, **self.options.dtypes}
        router = Router(
            c.hidden_size,
            count,
            top_k=top_k,
            normalized=normalized,
            keeps_float32=keeps_float32,
            **made,
        )
        return MixtureOfExperts(
            router,
            gate=ExpertLinear(count, c.hidden_size, size, **made),
            up=ExpertLinear(count, c.hidden_size, size, **made),
            down=ExpertLinear(count, size, c.hidden_size, **made),
            act=self.activation(),
            jitter=jitter,
            platform=self.options.platform,
        )


class RotaryModel(Backbone[C]):
    """Backbone of Llama-like models: embedding, blocks, RMSNorm. A family defines `block`."""

    layers = RotaryLayers


LAYER, HF_LAYER = "backbone.stack.blocks.{i}", "model.layers.{i}"
ROTARY_TABLE = Table(
    prefix="model.",
    entries=(
        *same("backbone.embed.weight", "model.embed_tokens.weight"),
        *norm(f"{LAYER}.attn_norm", f"{HF_LAYER}.input_layernorm"),
        *linear(f"{LAYER}.attn.q", f"{HF_LAYER}.self_attn.q_proj"),
        *linear(f"{LAYER}.attn.k", f"{HF_LAYER}.self_attn.k_proj"),
        *linear(f"{LAYER}.attn.v", f"{HF_LAYER}.self_attn.v_proj"),
        *linear(f"{LAYER}.attn.o", f"{HF_LAYER}.self_attn.o_proj"),
        *norm(f"{LAYER}.mlp_norm", f"{HF_LAYER}.post_attention_layernorm"),
        *linear(f"{LAYER}.mlp.gate", f"{HF_LAYER}.mlp.gate_proj"),
        *linear(f"{LAYER}.mlp.up", f"{HF_LAYER}.mlp.up_proj"),
        *linear(f"{LAYER}.mlp.down", f"{HF_LAYER}.mlp.down_proj"),
        *norm("backbone.stack.norm", "model.norm"),
        *same("lm_head.weight", "lm_head.weight"),
        *same("score.weight", "score.weight"),
    ),
    buffers=(
        r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"(model\.)?rotary_emb\.inv_freq",
    ),
    copies=((r"lm_head\.weight", "backbone.embed.weight"),),
)
"""Weight table common to Llama-like families; biases are used where the model has them."""
HEAD_NORMS = tuple(
    entry
    for name in ("q_norm", "k_norm")
    for entry in norm(f"{LAYER}.attn.{name}", f"{HF_LAYER}.self_attn.{name}")
)
"""Entries of families with norms of each head's query and key (QK norm)."""
