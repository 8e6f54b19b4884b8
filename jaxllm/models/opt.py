"""OPT (Zhang et al. 2022, arXiv:2205.01068) and Galactica (arXiv:2211.09085).

GPT-2 with ReLU. One of its sizes, 350M, has norms after each sublayer instead of before, and token
embeddings that are narrower than the hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models import config_checks as checks
from jaxllm.models.build_options import Options
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel
from jaxllm.models.layernorm_decoder import LayerFactory, LayerNormConfig, LayerNormDecoder
from jaxllm.models.weights import Table, linear, norm, projections, same
from jaxllm.nn.block import Block, StackOutput
from jaxllm.nn.linear import LayerNorm

OFF = (("activation_dropout", 0.0), ("learned_embeddings", True), ("scale_embeddings", False))
"""Keys of the published files that change nothing with these values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(LayerNormConfig):
    """OPT config, with the field names of config.json; `init_std` is `initializer_range` here.

    LayerDrop (`layerdrop`), which skips layers in training, is not implemented.
    """

    attribute_map: ClassVar[Mapping[str, str]] = {"init_std": "initializer_range"}

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    word_embed_proj_dim: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    num_attention_heads: int = 12
    activation_function: str = "relu"
    layerdrop: float = 0.0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 2
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    @property
    def model_type(self) -> str:
        return "opt"

    @property
    def width(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {"word_embed_proj_dim": self.width}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return super().from_dict({key: x for key, x in raw.items() if (key, x) not in OFF})

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw = super().to_json(model_type, architecture)
        raw["init_std"] = raw.pop("initializer_range")
        return raw

    def check(self) -> None:
        super().check()
        if self.word_embed_proj_dim is not None:
            checks.check_size(self, "word_embed_proj_dim")
        checks.check_no_layerdrop(self, "layerdrop")


class OPTBackbone(LayerNormDecoder[OPTConfig]):
    """OPT backbone: learned positions, blocks with LayerNorm and ReLU, projections at both ends if
    the token embeddings are narrower than the hidden states."""

    position_offset = 2

    def __init__(self, config: OPTConfig, options: Options, *, rngs: nnx.Rngs | None):
        super().__init__(config, options, rngs=rngs)
        make, sizes = LayerFactory(config, options, rngs), (config.width, config.hidden)
        is_narrow = config.width != config.hidden
        self.project_in = make.linear(*sizes, bias=False) if is_narrow else None
        self.project_out = make.linear(*sizes[::-1], bias=False) if is_narrow else None

    def block(self, make: LayerFactory, layer: int) -> Block:
        parts = (make.norm(), make.attention(), make.norm(), make.mlp())
        c = self.config
        return Block(*parts, norm_last=not c.do_layer_norm_before, dropout_rate=c.dropout)

    def final_norm(self, make: LayerFactory) -> LayerNorm | None:
        c = self.config
        removed = c._remove_final_layer_norm  # pyright: ignore[reportPrivateUsage]
        return make.norm() if c.do_layer_norm_before and not removed else None

    def block_input(self, x: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        return x if self.project_in is None else self.project_in(x)

    def run(self, *args: Any, **options: Any) -> StackOutput:
        out = super().run(*args, **options)
        if self.project_out is None:
            return out
        x, states = self.project_out(out.x), out.hidden_states
        states = None if states is None else (*states[:-1], x)
        return dataclasses.replace(out, x=x, hidden_states=states)


class OPTModel(DecoderOnlyModel):
    backbone_class = OPTBackbone


class OPTForCausalLM(CausalLM):
    backbone_class = OPTBackbone


class OPTForSequenceClassification(SequenceClassifier):
    backbone_class = OPTBackbone


LAYER, HF_LAYER = "backbone.stack.blocks.{i}", "model.decoder.layers.{i}"
OPT_TABLE = Table(
    prefix="model.",
    entries=(
        *same("backbone.embed.weight", "model.decoder.embed_tokens.weight"),
        *same("backbone.positions.weight", "model.decoder.embed_positions.weight"),
        *same("backbone.project_in.weight", "model.decoder.project_in.weight"),
        *same("backbone.project_out.weight", "model.decoder.project_out.weight"),
        *norm(f"{LAYER}.attn_norm", f"{HF_LAYER}.self_attn_layer_norm", bias=True),
        *projections(f"{LAYER}.attn", f"{HF_LAYER}.self_attn"),
        *norm(f"{LAYER}.mlp_norm", f"{HF_LAYER}.final_layer_norm", bias=True),
        *linear(f"{LAYER}.mlp.up", f"{HF_LAYER}.fc1"),
        *linear(f"{LAYER}.mlp.down", f"{HF_LAYER}.fc2"),
        *norm("backbone.stack.norm", "model.decoder.final_layer_norm", bias=True),
        *same("lm_head.weight", "lm_head.weight"),
        *same("score.weight", "score.weight"),
    ),
    buffers=(r"(model\.)?decoder\.version",),
    copies=((r"lm_head\.weight", "backbone.embed.weight"),),
)
