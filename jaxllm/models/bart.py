"""BART (Lewis et al. 2019, arXiv:1910.13461).

An encoder-decoder with learned positions, and norms after each sublayer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.cache.attention_view import AttentionView
from jaxllm.common.errors import UnsupportedError
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.encoder_decoder import EncoderDecoderLM, Side
from jaxllm.models.model import Head
from jaxllm.models.weights import Entry, Table, linear, norm, projections, same
from jaxllm.nn.attention import Attention, Scores
from jaxllm.nn.block import Block, Stack
from jaxllm.nn.linear import Embedding, LayerNorm, Linear
from jaxllm.nn.mlp import MLP, activation

POSITION_OFFSET = 2
"""Rows of the table of positions before the first one, which are not used."""
OFF = ("normalize_before", "add_final_layer_norm", "add_bias_logits", "static_position_embeddings")
"""Keys of old files that switch on what BART does not have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(cfg.ModelConfig):
    """BART config, with the field names of config.json.

    `classifier_dropout` belongs to a class that is not here. LayerDrop (`encoder_layerdrop`,
    `decoder_layerdrop`), which skips layers in training, is not implemented.
    """

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    is_encoder_decoder: ClassVar[bool] = True

    vocab_size: int = 50265
    max_position_embeddings: int = 1024
    encoder_layers: int = 12
    encoder_ffn_dim: int = 4096
    encoder_attention_heads: int = 16
    decoder_layers: int = 12
    decoder_ffn_dim: int = 4096
    decoder_attention_heads: int = 16
    encoder_layerdrop: float = 0.0
    decoder_layerdrop: float = 0.0
    activation_function: str = "gelu"
    d_model: int = 1024
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_std: float = 0.02
    classifier_dropout: float = 0.0
    scale_embedding: bool = False
    tie_word_embeddings: bool = True
    num_labels: int = 3
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    decoder_start_token_id: int | None = 2

    @property
    def model_type(self) -> str:
        return "bart"

    @property
    def width(self) -> int:
        return self.d_model

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings

    @property
    def context_length(self) -> int | None:
        return self.max_position_embeddings

    @property
    def head_counts(self) -> dict[str, int]:
        names = ("encoder_attention_heads", "decoder_attention_heads")
        return {name: getattr(self, name) for name in names}

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {"init_std": 0.0, "classifier_dropout": 0.0}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> BartConfig:
        """Reads and checks a config.json object.

        Raises ConfigError or UnsupportedError, naming the field.
        """
        handled = frozenset(name for name in OFF if not raw.get(name))
        if raw.get("normalize_embedding") in (None, True):
            handled |= {"normalize_embedding"}
        if raw.get("extra_pos_embeddings") in (None, POSITION_OFFSET):
            handled |= {"extra_pos_embeddings"}
        if not raw.get("force_bos_token_to_be_generated") or "forced_bos_token_id" in raw:
            handled |= {"force_bos_token_to_be_generated"}  # the old name of forced_bos_token_id
        # Of the classifier, and of the training of DistilBART.
        handled |= {"classif_dropout", "replacing_rate", "save_step"}
        config = cfg.read_config(cls, raw, handled=handled)
        config.check()
        cfg.check_token_ids(config)
        return config

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        return super().to_json(model_type, architecture) | {"is_encoder_decoder": True}

    def check(self) -> None:
        super().check()
        for side in ("encoder", "decoder"):
            checks.check_size(self, f"{side}_ffn_dim", f"{side}_attention_heads")
            checks.check_size(self, f"{side}_layers", limit=checks.MAX_LAYERS)
            checks.check_divides(self, "d_model", f"{side}_attention_heads")
            checks.check_no_layerdrop(self, f"{side}_layerdrop")
        if not self.tie_word_embeddings:
            raise UnsupportedError(
                "tie_word_embeddings: encoder, decoder and head share one matrix here, found false"
            )
        checks.check_size(self, "d_model", "max_position_embeddings")
        for name in ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout"):
            checks.check_rate(self, name)
        checks.check_positive(self, "init_std")
        activation(self.activation_function, where="activation_function")


class Positions(nnx.Module):
    """Adds learned positions to token embeddings, and normalises the sums."""

    def __init__(self, positions: Embedding, norm: LayerNorm):
        self.positions, self.norm = positions, norm

    def __call__(self, x: Float[Array, "B T D"], view: AttentionView) -> Float[Array, "B T D"]:
        return self.norm(x + self.positions(view.positions + POSITION_OFFSET))


@dataclasses.dataclass(frozen=True)
class BartLayers:
    """Builds the layers of one side with the sizes and dtypes of one model."""

    config: BartConfig
    options: Options
    rngs: nnx.Rngs | None
    side: Side

    def size(self, name: str) -> int:
        return getattr(self.config, f"{self.side}_{name}")

    def linear(self, inputs: int, outputs: int) -> Linear:
        std, dtypes = self.config.init_std, self.options.dtypes
        return Linear(inputs, outputs, use_bias=True, std=std, rngs=self.rngs, **dtypes)

    def norm(self) -> LayerNorm:
        return LayerNorm(self.config.d_model, eps=1e-5, **self.options.dtypes)

    def positions(self) -> Positions:
        c = self.config
        rows = c.max_position_embeddings + POSITION_OFFSET
        dtypes = self.options.dtypes
        table = Embedding(rows, c.d_model, std=c.init_std, rngs=self.rngs, **dtypes)
        return Positions(table, self.norm())

    def attention(self) -> Attention:
        c, heads = self.config, self.size("attention_heads")
        q, k, v, o = (self.linear(c.d_model, c.d_model) for _ in range(4))
        return Attention(
            q,
            k,
            v,
            o,
            heads=heads,
            kv_heads=heads,
            head_dim=c.d_model // heads,
            scores=Scores((c.d_model // heads) ** -0.5),
            dropout_rate=c.attention_dropout,
            implementation=self.options.attn_implementation,
        )

    def block(self) -> Block:
        c, inner = self.config, self.size("ffn_dim")
        act = activation(c.activation_function, where="activation_function")
        up, down = self.linear(c.d_model, inner), self.linear(inner, c.d_model)
        decodes = self.side == "decoder"
        return Block(
            self.norm(),
            self.attention(),
            self.norm(),
            MLP(up, down, act, dropout_rate=c.activation_dropout),
            cross_norm=self.norm() if decodes else None,
            cross=self.attention() if decodes else None,
            norm_last=True,
            dropout_rate=c.dropout,
        )

    def stack(self) -> Stack:
        blocks = [self.block() for _ in range(self.size("layers"))]
        return Stack(blocks, None, embedding_dropout=self.config.dropout, **self.options.stack)


class BartForConditionalGeneration(EncoderDecoderLM[BartConfig]):
    """BART with LM head, whose matrix is the token embedding."""

    def __init__(self, config: BartConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        c, dtypes = config, options.dtypes
        scale = c.d_model**0.5 if c.scale_embedding else None
        self.shared = Embedding(
            c.vocab_size, c.d_model, std=c.init_std, scale=scale, rngs=rngs, **dtypes
        )
        make = {side: BartLayers(config, options, rngs, side) for side in ("encoder", "decoder")}
        self.encoder_input = make["encoder"].positions()
        self.decoder_input = make["decoder"].positions()
        self.encoder, self.decoder = make["encoder"].stack(), make["decoder"].stack()
        self.lm_head = None
        self.final_logits_bias = nnx.Param(jnp.zeros((1, c.vocab_size), options.param_dtype))

    def embed_inputs(
        self, x: Float[Array, "B T D"], view: AttentionView, side: Side
    ) -> Float[Array, "B T D"]:
        return (self.encoder_input if side == "encoder" else self.decoder_input)(x, view)

    def resized_constants(self, size: int) -> dict[str, jax.Array]:
        old = self.final_logits_bias[...]
        new = jnp.zeros((1, max(0, size - old.shape[1])), old.dtype)
        return {"final_logits_bias": jnp.concatenate([old[:, :size], new], axis=1)}

    @property
    def head(self) -> Head:
        # A constant of the checkpoint, which is not trained.
        return dataclasses.replace(super().head, bias=self.final_logits_bias[...])


def bart_table() -> Table:
    """Weight table of BART."""
    return Table(
        (
            *same("shared.weight", "model.shared.weight"),
            *_side("encoder"),
            *_side("decoder"),
            *same("final_logits_bias", "final_logits_bias"),
        ),
        prefix="model.",
        buffers=(r"(model\.)?(encoder|decoder)\.version",),
        zeros=frozenset({"final_logits_bias"}),
        copies=(
            (r"(model\.)?(encoder|decoder)\.embed_tokens\.weight", "shared.weight"),
            (r"lm_head\.weight", "shared.weight"),
        ),
    )


def _side(side: Side) -> Iterator[Entry]:
    layer, hf = f"{side}.blocks.{{i}}", f"model.{side}.layers.{{i}}"
    parts = {"attn": "self_attn", **({"cross": "encoder_attn"} if side == "decoder" else {})}
    yield from same(f"{side}_input.positions.weight", f"model.{side}.embed_positions.weight")
    yield from norm(f"{side}_input.norm", f"model.{side}.layernorm_embedding", bias=True)
    for ours, theirs in parts.items():
        yield from projections(f"{layer}.{ours}", f"{hf}.{theirs}")
        yield from norm(f"{layer}.{ours}_norm", f"{hf}.{theirs}_layer_norm", bias=True)
    yield from linear(f"{layer}.mlp.up", f"{hf}.fc1")
    yield from linear(f"{layer}.mlp.down", f"{hf}.fc2")
    yield from norm(f"{layer}.mlp_norm", f"{hf}.final_layer_norm", bias=True)
