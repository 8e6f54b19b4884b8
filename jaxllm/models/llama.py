"""Llama (Touvron et al. 2023, arXiv:2302.13971), with everything config.json may ask of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxllm.common.errors import ConfigError, InputError
from jaxllm.models import config as cfg
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.decoder_only import Backbone, CausalLM
from jaxllm.models.weights import Table, linear, norm, same
from jaxllm.nn.activations import activation
from jaxllm.nn.attention import Attention
from jaxllm.nn.blocks import Block, Stack
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rope, rope_from_config

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
class LlamaConfig(cfg.ModelConfig):
    """Fields of config.json under their own names; RoPE's two spellings end up in `rope`.

    `pretraining_tp` changes how a product was split, not its result. `max_position_embeddings`
    acts through RoPE (dynamic scaling) and as generate()'s default limit. `rope` None is RoPE
    without scaling, base 10000.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    pretraining_tp: int = 1
    rope: Rope | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def size_per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary(self) -> Rope:
        rope = self.rope or Rope(
            head_dim=self.size_per_head, max_positions=self.max_position_embeddings
        )
        if rope.head_dim != self.size_per_head:
            raise ConfigError(f"rope: for head_dim {rope.head_dim}, not {self.size_per_head}")
        return rope

    @property
    def width(self) -> int:
        return self.hidden_size

    @property
    def head_counts(self) -> dict[str, int]:
        return {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.kv_heads,
        }

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """Reads and checks a config.json object.

        Raises ConfigError or UnsupportedError, naming the field.

        >>> LlamaConfig.from_dict({"hidden_size": 64, "num_attention_heads": 4}).size_per_head
        16
        """
        config = cfg.read_config(cls, raw, handled=ROPE_KEYS, derived=frozenset({"rope"}))
        cfg.check_common(config)
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "pretraining_tp")
        cfg.check_size(config, *sizes, "max_position_embeddings")
        cfg.check_size(config, "num_hidden_layers", limit=cfg.MAX_LAYERS)
        for name in ("num_key_value_heads", "head_dim"):
            if getattr(config, name) is not None:
                cfg.check_size(config, name)
        if config.head_dim is None:
            cfg.check_divides(config, "hidden_size", "num_attention_heads")
        if config.num_attention_heads % config.kv_heads:
            raise ConfigError(
                f"num_key_value_heads: {config.kv_heads} does not divide num_attention_heads, "
                f"{config.num_attention_heads}"
            )
        cfg.check_rate(config, "attention_dropout")
        cfg.check_positive(config, "rms_norm_eps", "initializer_range")
        activation(config.hidden_act, where="hidden_act")
        rope = rope_from_config(
            raw, head_dim=config.size_per_head, max_positions=config.max_position_embeddings
        )
        return dataclasses.replace(config, rope=rope)


class LlamaModel(Backbone):
    """Token embedding and blocks: RMSNorm, rotary attention with grouped keys, SwiGLU."""

    def __init__(self, config: LlamaConfig, options: Options, *, rngs: nnx.Rngs | None):
        c, kinds = config, options.dtypes
        heads, kv_heads, size = c.num_attention_heads, c.kv_heads, c.size_per_head

        def project(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(
                inputs, outputs, use_bias=bias, std=c.initializer_range, rngs=rngs, **kinds
            )

        def block() -> Block:
            attn = Attention(
                q=project(c.hidden_size, heads * size, c.attention_bias),
                k=project(c.hidden_size, kv_heads * size, c.attention_bias),
                v=project(c.hidden_size, kv_heads * size, c.attention_bias),
                o=project(heads * size, c.hidden_size, c.attention_bias),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=size,
                scale=size**-0.5,
                dropout_rate=c.attention_dropout,
                implementation=options.attn_implementation,
            )
            mlp = GatedMLP(
                gate=project(c.hidden_size, c.intermediate_size, c.mlp_bias),
                up=project(c.hidden_size, c.intermediate_size, c.mlp_bias),
                down=project(c.intermediate_size, c.hidden_size, c.mlp_bias),
                act=activation(c.hidden_act, where="hidden_act"),
            )
            return Block(rms(), attn, rms(), mlp)

        def rms() -> RMSNorm:
            return RMSNorm(c.hidden_size, eps=c.rms_norm_eps, **kinds)

        self.config, self.rope = c, c.rotary
        self.embed = Embedding(
            c.vocab_size, c.hidden_size, std=c.initializer_range, rngs=rngs, **kinds
        )
        self.stack = Stack(
            [block() for _ in range(c.num_hidden_layers)], rms(), remat=options.remat
        )

    def embed_tokens(self, input_ids, inputs_embeds, view, token_type_ids):
        if token_type_ids is not None:
            raise InputError("token_type_ids: Llama has no token types")
        return self.embed.of(input_ids, inputs_embeds)

    def rotary(self, view):
        return self.rope.angles(view.positions, view.horizon)


class LlamaForCausalLM(CausalLM):
    def __init__(self, config: LlamaConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        self.backbone = LlamaModel(config, options, rngs=rngs)
        head = (config.hidden_size, config.vocab_size)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(*head, std=config.initializer_range, rngs=rngs, **options.dtypes)
        )


class LlamaForSequenceClassification(SequenceClassifier):
    def __init__(self, config: LlamaConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        self.backbone = LlamaModel(config, options, rngs=rngs)
        self.score = Linear(
            config.hidden_size,
            config.num_labels,
            std=config.initializer_range,
            rngs=rngs,
            **options.dtypes,
        )


LAYER, THEIRS = "backbone.stack.blocks.{i}", "model.layers.{i}"
LLAMA_TABLE = Table(
    prefix="model.",
    entries=(
        *same("backbone.embed.weight", "model.embed_tokens.weight"),
        *norm(f"{LAYER}.attn_norm", f"{THEIRS}.input_layernorm"),
        *linear(f"{LAYER}.attn.q", f"{THEIRS}.self_attn.q_proj"),
        *linear(f"{LAYER}.attn.k", f"{THEIRS}.self_attn.k_proj"),
        *linear(f"{LAYER}.attn.v", f"{THEIRS}.self_attn.v_proj"),
        *linear(f"{LAYER}.attn.o", f"{THEIRS}.self_attn.o_proj"),
        *norm(f"{LAYER}.mlp_norm", f"{THEIRS}.post_attention_layernorm"),
        *linear(f"{LAYER}.mlp.gate", f"{THEIRS}.mlp.gate_proj"),
        *linear(f"{LAYER}.mlp.up", f"{THEIRS}.mlp.up_proj"),
        *linear(f"{LAYER}.mlp.down", f"{THEIRS}.mlp.down_proj"),
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
