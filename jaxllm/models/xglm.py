"""XGLM (Lin et al. 2021, arXiv:2112.10668): a multilingual decoder-only model.

It has sinusoidal positions, norms before each sublayer, and biases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.cache.attention_view import AttentionView
from jaxllm.models import absolute_encoder_decoder as absolute
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.build_options import Options
from jaxllm.models.decoder_only import Backbone, CausalLM, DecoderOnlyModel
from jaxllm.models.outputs import BaseOutput
from jaxllm.models.weights import Table, norm, same
from jaxllm.nn.mlp import activation
from jaxllm.nn.positions import Sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class XGLMConfig(cfg.DecoderOnlyConfig):
    """XGLM config, with the names of config.json; `init_std` there is `initializer_range` here."""

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "init_std": "initializer_range",
        "num_attention_heads": "attention_heads",
        "num_hidden_layers": "num_layers",
    }
    pre_norm: ClassVar[bool] = True
    embedding_norm = separate_embeddings = False
    position_offset: ClassVar[int] = 2

    vocab_size: int = 256008
    max_position_embeddings: int = 2048
    d_model: int = 1024
    ffn_dim: int = 4096
    num_layers: int = 24
    attention_heads: int = 16
    activation_function: str = "gelu"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.0
    layerdrop: float = 0.0
    scale_embedding: bool = True
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    decoder_start_token_id: int | None = 2

    @property
    def model_type(self) -> str:
        return "xglm"

    @property
    def sinusoids(self) -> Sinusoids:
        return Sinusoids(self.d_model, steps=self.d_model // 2 - 1, zero_row=self.pad_token_id)

    @property
    def width(self) -> int:
        return self.d_model

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    @property
    def head_counts(self) -> dict[str, int]:
        return {"attention_heads": self.attention_heads}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> XGLMConfig:
        """Reads and checks a config.json object; the errors name the field."""
        config = cfg.read_config(cls, raw)
        config.check()
        cfg.check_token_ids(config)
        return config

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {"max_position_embeddings": 0}

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw = super().to_json(model_type, architecture)
        return raw | {"init_std": raw.pop("initializer_range")}

    def check(self) -> None:
        super().check()
        checks.check_size(self, "d_model", "ffn_dim", "attention_heads", "max_position_embeddings")
        checks.check_size(self, "num_layers", limit=checks.MAX_LAYERS)
        checks.check_divides(self, "d_model", "attention_heads")
        absolute.check_sinusoids(self.d_model)
        checks.check_rate(self, "dropout", "attention_dropout", "activation_dropout", "layerdrop")
        checks.check_positive(self, "initializer_range")
        activation(self.activation_function, where="activation_function")


class XGLMLayers(absolute.AbsoluteLayers):
    """Builds the layers of XGLM."""

    @property
    def has_cross(self) -> bool:
        return self.config.add_cross_attention

    def size(self, name: str) -> int:
        return getattr(self.config, {"layers": "num_layers"}.get(name, name))


class XGLMBackbone(Backbone[XGLMConfig]):
    """XGLM backbone."""

    def __init__(self, config: XGLMConfig, options: Options, *, rngs: nnx.Rngs | None):
        make = XGLMLayers(config, options, rngs, "decoder")
        self.config = config.forward_part("pad_token_id")
        self.embed, self.input = make.tokens(), make.positions()
        self.stack = make.stack()

    def embed_tokens(
        self,
        input_ids: Int[Array, "B T"] | None,
        inputs_embeds: Float[Array, "B T D"] | None,
        view: AttentionView,
        token_type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        return self.input(
            super().embed_tokens(input_ids, inputs_embeds, view, token_type_ids), view
        )


class XGLMModel(DecoderOnlyModel):
    backbone_class = XGLMBackbone


class XGLMForCausalLM(CausalLM):
    backbone_class = XGLMBackbone
    config_reads = ("pad_token_id",)

    def hidden(self, *args: Any, dropout_key: Array | None = None, **options: Any) -> BaseOutput:
        absolute.refuse_layerdrop(self.config, ("layerdrop",), dropout_key)
        return super().hidden(*args, dropout_key=dropout_key, **options)


def xglm_table(config: XGLMConfig) -> Table:
    """Weight table of XGLM, whose old files hold its positions."""
    parts = {"attn": "self_attn", "cross": "encoder_attn"}
    return Table(
        (
            *same("backbone.embed.weight", "model.embed_tokens.weight"),
            *absolute.layer_entries("backbone.stack.blocks.{i}", "model.layers.{i}", parts),
            *norm("backbone.stack.norm", "model.layer_norm", bias=True),
            *same("lm_head.weight", "lm_head.weight"),
        ),
        prefix="model.",
        copies=((r"lm_head\.weight", "backbone.embed.weight"),),
        constants=absolute.sinusoid_tables(config.sinusoids),
    )
