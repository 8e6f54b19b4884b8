"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"), and what its
relatives share: a config whose fields have names of their own, and a weight table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.backbone import Backbone, LayerFactory
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.weights import Table, linear, norm, same
from jaxllm.nn.attention import Scores
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig(cfg.DecoderOnlyConfig):
    """Config with the field names of config.json, which differ between these families
    (`models.config.NAMES`)."""

    absent_tokens = (*cfg.DecoderOnlyConfig.absent_tokens, "pad_token_id")

    tie_word_embeddings: bool = True

    @property
    def max_positions(self) -> int | None:
        return self.value("positions", None)

    def forward_values(self) -> dict[str, Any]:
        name = self.field("inner")
        return super().forward_values() | ({} if name is None else {name: self.inner})

    def check(self) -> None:
        super().check()
        checks.check_divides(self, self.field("width") or "", self.field("heads") or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(LayerNormConfig):
    """GPT-2 config, with the field names of config.json.

    `reorder_and_upcast_attn` (attention scores in float32) has no effect: they always are.
    """

    model_type = "gpt2"
    unread = (*LayerNormConfig.unread, "reorder_and_upcast_attn")
    flax_constants: ClassVar[Mapping[str, Any]] = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }
    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256


class GPT2Backbone(Backbone[GPT2Config]):
    """GPT-2 backbone: learned positions, pre-norm blocks with LayerNorm, biases and GELU."""

    token_types = True

    def block(self, make: LayerFactory, layer: int) -> Block:
        c = self.config
        scale = c.size_per_head**-0.5 if c.scale_attn_weights else 1.0
        if c.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        options = {"cross": c.add_cross_attention, "dropout_rate": c.resid_pdrop}
        return make.plain_block(scores=Scores(scale), **options)


class GPT2Model(DecoderOnlyModel):
    backbone_class = GPT2Backbone


class GPT2LMHeadModel(CausalLM):
    backbone_class = GPT2Backbone


class GPT2ForSequenceClassification(SequenceClassifier):
    backbone_class = GPT2Backbone


LAYER, HF_LAYER = "backbone.stack.blocks.{i}", "transformer.h.{i}"
GPT_TABLE = Table(
    prefix="transformer.",
    entries=(
        *same("backbone.embed.weight", "transformer.wte.weight"),
        *same("backbone.positions.weight", "transformer.wpe.weight"),
        *norm(f"{LAYER}.attn_norm", f"{HF_LAYER}.ln_1", bias=True),
        *norm(f"{LAYER}.mlp_norm", f"{HF_LAYER}.ln_2", bias=True),
        *norm("backbone.stack.norm", "transformer.ln_f", bias=True),
        *same("lm_head.weight", "lm_head.weight"),
        *same("score.weight", "score.weight"),
    ),
    # Causal masks, which old files store as tensors.
    buffers=(r"(transformer\.)?h\.\d+\.(attn|crossattention|attn\.attention)\.(bias|masked_bias)",),
    copies=((r"lm_head\.weight", "backbone.embed.weight"),),
)
"""Weight table common to families with GPT-2's names, without attention and feed-forward layers."""
QKV = tuple(f"{LAYER}.attn.{x}" for x in "qkv")
CROSS_KV = tuple(f"{LAYER}.cross.{x}" for x in "kv")
GPT2_TABLE = GPT_TABLE.with_entries(
    *linear(QKV, f"{HF_LAYER}.attn.c_attn", transposed=True),
    *linear(f"{LAYER}.attn.o", f"{HF_LAYER}.attn.c_proj", transposed=True),
    *norm(f"{LAYER}.cross_norm", f"{HF_LAYER}.ln_cross_attn", bias=True),
    *linear(f"{LAYER}.cross.q", f"{HF_LAYER}.crossattention.q_attn", transposed=True),
    *linear(CROSS_KV, f"{HF_LAYER}.crossattention.c_attn", transposed=True),
    *linear(f"{LAYER}.cross.o", f"{HF_LAYER}.crossattention.c_proj", transposed=True),
    *linear(f"{LAYER}.mlp.up", f"{HF_LAYER}.mlp.c_fc", transposed=True),
    *linear(f"{LAYER}.mlp.down", f"{HF_LAYER}.mlp.c_proj", transposed=True),
)
