"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.cache.attention_view import AttentionView
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.build_options import Options
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.decoder_only import Backbone, CausalLM, DecoderOnlyModel
from jaxllm.models.weights import Table, linear, norm, same
from jaxllm.nn.attention import Attention, Scores
from jaxllm.nn.block import Block, Stack
from jaxllm.nn.linear import Embedding, LayerNorm, Linear
from jaxllm.nn.mlp import MLP, activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(cfg.DecoderOnlyConfig):
    """GPT-2 config, with the field names of config.json.

    `reorder_and_upcast_attn` (attention scores in float32) has no effect: they always are.
    """

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
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256

    @property
    def model_type(self) -> str:
        return "gpt2"

    def forward_values(self) -> dict[str, Any]:
        inner = 4 * self.n_embd if self.n_inner is None else self.n_inner
        return super().forward_values() | {"n_inner": inner, "reorder_and_upcast_attn": False}

    @property
    def max_positions(self) -> int:
        return self.n_positions

    @property
    def width(self) -> int:
        return self.n_embd

    @property
    def head_counts(self) -> dict[str, int]:
        return {"n_head": self.n_head}

    @property
    def context_length(self) -> int:
        return self.n_positions

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> GPT2Config:
        """Reads and checks a config.json object.

        Raises ConfigError or UnsupportedError, naming the field.
        """
        config = cfg.read_config(cls, raw)
        config = cfg.without_absent_tokens(config, "pad_token_id")
        config.check()
        cfg.check_token_ids(config)
        return config

    def check(self) -> None:
        super().check()
        checks.check_size(self, "n_positions", "n_embd", "n_head")
        checks.check_size(self, "n_layer", limit=checks.MAX_LAYERS)
        if self.n_inner is not None:
            checks.check_size(self, "n_inner")
        checks.check_divides(self, "n_embd", "n_head")
        checks.check_rate(self, "resid_pdrop", "embd_pdrop", "attn_pdrop")
        checks.check_positive(self, "layer_norm_epsilon", "initializer_range")
        activation(self.activation_function, where="activation_function")


class GPT2Backbone(Backbone[GPT2Config]):
    """GPT-2 backbone: learned positions, pre-norm blocks with LayerNorm, biases and GELU."""

    def __init__(self, config: GPT2Config, options: Options, *, rngs: nnx.Rngs | None):
        c, dtypes = config, options.dtypes
        size = c.n_embd // c.n_head

        def project(inputs: int, outputs: int) -> Linear:
            return Linear(
                inputs, outputs, use_bias=True, std=c.initializer_range, rngs=rngs, **dtypes
            )

        def layer_norm() -> LayerNorm:
            return LayerNorm(c.n_embd, eps=c.layer_norm_epsilon, **dtypes)

        def attention(layer: int) -> Attention:
            scale = size**-0.5 if c.scale_attn_weights else 1.0
            if c.scale_attn_by_inverse_layer_idx:
                scale /= layer + 1
            q, k, v, o = (project(c.n_embd, c.n_embd) for _ in range(4))
            return Attention(
                q,
                k,
                v,
                o,
                heads=c.n_head,
                kv_heads=c.n_head,
                head_dim=size,
                scores=Scores(scale),
                dropout_rate=c.attn_pdrop,
                implementation=options.attn_implementation,
            )

        def block(layer: int) -> Block:
            inner = 4 * c.n_embd if c.n_inner is None else c.n_inner
            act = activation(c.activation_function, where="activation_function")
            mlp = MLP(project(c.n_embd, inner), project(inner, c.n_embd), act)
            return Block(
                layer_norm(),
                attention(layer),
                layer_norm(),
                mlp,
                cross_norm=layer_norm() if c.add_cross_attention else None,
                cross=attention(layer) if c.add_cross_attention else None,
                dropout_rate=c.resid_pdrop,
            )

        def embedding(rows: int) -> Embedding:
            return Embedding(rows, c.n_embd, std=c.initializer_range, rngs=rngs, **dtypes)

        self.config, self.max_positions = c.forward_part(), c.n_positions
        self.embed, self.positions = embedding(c.vocab_size), embedding(c.n_positions)
        self.stack = Stack(
            [block(i) for i in range(c.n_layer)],
            layer_norm(),
            embedding_dropout=c.embd_pdrop,
            **options.stack,
        )

    def embed_tokens(
        self,
        input_ids: Int[Array, "B T"] | None,
        inputs_embeds: Float[Array, "B T D"] | None,
        view: AttentionView,
        token_type_ids: Int[Array, "B T"] | None,
    ):
        x = self.embed.from_ids_or_embeds(input_ids, inputs_embeds) + self.positions(view.positions)
        # Token types share the token embedding, as in transformers.
        return x if token_type_ids is None else x + self.embed(token_type_ids)


class GPT2Model(DecoderOnlyModel):
    backbone_class = GPT2Backbone


class GPT2LMHeadModel(CausalLM):
    backbone_class = GPT2Backbone


class GPT2ForSequenceClassification(SequenceClassifier):
    backbone_class = GPT2Backbone


LAYER, HF_LAYER = "backbone.stack.blocks.{i}", "transformer.h.{i}"
QKV = tuple(f"{LAYER}.attn.{x}" for x in "qkv")
CROSS_KV = tuple(f"{LAYER}.cross.{x}" for x in "kv")
GPT2_TABLE = Table(
    prefix="transformer.",
    entries=(
        *same("backbone.embed.weight", "transformer.wte.weight"),
        *same("backbone.positions.weight", "transformer.wpe.weight"),
        *norm(f"{LAYER}.attn_norm", f"{HF_LAYER}.ln_1", bias=True),
        *linear(QKV, f"{HF_LAYER}.attn.c_attn", transposed=True),
        *linear(f"{LAYER}.attn.o", f"{HF_LAYER}.attn.c_proj", transposed=True),
        *norm(f"{LAYER}.cross_norm", f"{HF_LAYER}.ln_cross_attn", bias=True),
        *linear(f"{LAYER}.cross.q", f"{HF_LAYER}.crossattention.q_attn", transposed=True),
        *linear(CROSS_KV, f"{HF_LAYER}.crossattention.c_attn", transposed=True),
        *linear(f"{LAYER}.cross.o", f"{HF_LAYER}.crossattention.c_proj", transposed=True),
        *norm(f"{LAYER}.mlp_norm", f"{HF_LAYER}.ln_2", bias=True),
        *linear(f"{LAYER}.mlp.up", f"{HF_LAYER}.mlp.c_fc", transposed=True),
        *linear(f"{LAYER}.mlp.down", f"{HF_LAYER}.mlp.c_proj", transposed=True),
        *norm("backbone.stack.norm", "transformer.ln_f", bias=True),
        *same("lm_head.weight", "lm_head.weight"),
        *same("score.weight", "score.weight"),
    ),
    # Causal masks, which old files store as tensors.
    buffers=(r"(transformer\.)?h\.\d+\.(attn|crossattention)\.(bias|masked_bias)",),
    copies=((r"lm_head\.weight", "backbone.embed.weight"),),
)
