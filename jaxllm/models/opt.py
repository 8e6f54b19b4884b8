"""OPT (Zhang et al. 2022, arXiv:2205.01068) and Galactica (arXiv:2211.09085).

GPT-2 with ReLU. One of its sizes, 350M, has norms after each sublayer instead of before, and token
embeddings that are narrower than the hidden states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from jaxllm.common.errors import UnsupportedError
from jaxllm.models.backbone import Backbone, LayerFactory
from jaxllm.models.build_options import Options
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.gpt2 import LAYER, LayerNormConfig
from jaxllm.models.weights import Table, attention_and_mlp, norm, same
from jaxllm.nn.block import Block, StackOutput
from jaxllm.nn.linear import LayerNorm, RMSNorm


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(LayerNormConfig):
    """OPT config, with the field names of config.json; `init_std` is `initializer_range` here.

    LayerDrop (`layerdrop`), which skips layers in training, is not implemented.
    """

    model_type = "opt"
    no_effect: ClassVar[Mapping[str, Any]] = {
        "activation_dropout": 0.0,
        "learned_embeddings": True,
        "scale_embeddings": False,
    }
    written_names: ClassVar[Mapping[str, str]] = {"initializer_range": "init_std"}
    flax_constants: ClassVar[Mapping[str, Any]] = {
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    }
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
    def width(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {"word_embed_proj_dim": self.width}

    def is_extra_in_flax(self, tensor: str) -> bool:
        if "layer_norm." in tensor:
            return not self.layer_norm_elementwise_affine
        return not self.enable_bias and tensor.endswith(".bias")

    def check(self) -> None:
        if self.layerdrop:
            raise UnsupportedError(
                f"layerdrop: LayerDrop is not implemented, found {self.layerdrop}; it acts in "
                "training only, so 0 gives the same answers"
            )
        super().check()


class OPTBackbone(Backbone[OPTConfig]):
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

    def final_norm(self, make: LayerFactory) -> LayerNorm | RMSNorm | None:
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


OPT_TABLE = Table(
    prefix="model.",
    entries=(
        *same("backbone.embed.weight", "model.decoder.embed_tokens.weight"),
        *same("backbone.positions.weight", "model.decoder.embed_positions.weight"),
        *same("backbone.project_in.weight", "model.decoder.project_in.weight"),
        *same("backbone.project_out.weight", "model.decoder.project_out.weight"),
        *attention_and_mlp(LAYER, "model.decoder.layers.{i}", {"attn": "self_attn"}),
        *norm("backbone.stack.norm", "model.decoder.final_layer_norm", bias=True),
        *same("lm_head.weight", "lm_head.weight"),
        *same("score.weight", "score.weight"),
    ),
    buffers=(r"(model\.)?decoder\.version",),
    copies=((r"lm_head\.weight", "backbone.embed.weight"),),
)
