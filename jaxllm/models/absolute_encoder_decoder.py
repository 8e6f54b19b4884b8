"""Encoder-decoders with absolute positions: what BART and its relatives have in common.

A family's config says where the norms are and which positions it has. Its class and its weight
table are then built here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.cache.attention_view import AttentionView, SequenceMask
from jaxllm.common.errors import UnsupportedError
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.backbone import LayerFactory, lm_head
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.encoder_decoder import Encoded, EncoderDecoderLM, Seq2SeqInputs, Side
from jaxllm.models.model import Head
from jaxllm.models.weights import Entry, Table, attention_and_mlp, norm, same
from jaxllm.nn.block import Stack, StackOutput, clamp_to_float16
from jaxllm.nn.linear import Embedding, LayerNorm, RMSNorm
from jaxllm.nn.positions import Sinusoids

C = TypeVar("C", bound="AbsoluteConfig")

LEARNED_OFFSET = 2
"""Rows of a learned table of positions before the first one, which are not used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsoluteConfig(cfg.ModelConfig):
    """Config fields common to BART and its relatives, with the names of config.json.

    LayerDrop (`encoder_layerdrop`, `decoder_layerdrop`), which skips layers in training, is not
    implemented: training a model with a rate above 0 raises.
    """

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    is_encoder_decoder: ClassVar[bool] = True
    unread: ClassVar[tuple[str, ...]] = (*cfg.ModelConfig.unread, "init_std")
    pre_norm: ClassVar[bool] = False
    """True: norms before each sublayer and at the end of each side. False: after each sublayer."""
    embedding_norm: ClassVar[bool] = False
    """True: a norm of the sum of token embeddings and positions."""
    scales_decoder_embeds: ClassVar[bool] = False
    """True: `scale_embedding` multiplies the caller's `decoder_inputs_embeds` too."""

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
    scale_embedding: bool = False
    tie_word_embeddings: bool = True

    @property
    def sinusoids(self) -> Sinusoids | None:
        """Sinusoidal positions; None: the positions are learned."""
        return None

    @property
    def position_offset(self) -> int:
        """Number of the first token's position, before which a table may have other rows."""
        return 0

    @property
    def separate_embeddings(self) -> bool:
        """True if encoder and decoder have a token embedding each."""
        return False

    @property
    def max_positions(self) -> int | None:
        return self.max_position_embeddings

    @property
    def head_counts(self) -> dict[str, int]:
        names = ("encoder_attention_heads", "decoder_attention_heads")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        """Keys of old files that say what the family is in any case, or that change nothing."""
        has_sinusoids = cls.sinusoids is not AbsoluteConfig.sinusoids
        # Sinusoidal positions have no rows before the first position.
        extra_rows = raw.get("extra_pos_embeddings") if has_sinusoids else LEARNED_OFFSET
        implied = {
            "normalize_before": cls.pre_norm,
            "add_final_layer_norm": cls.pre_norm,
            "normalize_embedding": cls.embedding_norm,
            "static_position_embeddings": has_sinusoids,
            "extra_pos_embeddings": extra_rows,
            "add_bias_logits": False,
            "do_blenderbot_90_layernorm": False,
        }
        handled = {key for key, value in implied.items() if raw.get(key) in (None, value)}
        # Read with the generation settings; of classifiers; of the training of distilled models.
        handled |= {"force_bos_token_to_be_generated", "classif_dropout"}
        handled |= {"replacing_rate", "save_step"}
        return super().handled_keys(raw) | handled

    def check(self) -> None:
        super().check()
        for side in ("encoder", "decoder"):
            checks.check_divides(self, "d_model", f"{side}_attention_heads")
        self.check_tying()
        if self.sinusoids is not None:
            check_sinusoids(self.d_model)

    def check_tying(self) -> None:
        if not self.tie_word_embeddings:
            raise UnsupportedError(
                "tie_word_embeddings: encoder, decoder and head share one matrix here, found false"
            )


def check_sinusoids(width: int) -> None:
    """Raises UnsupportedError for a width that sinusoidal positions are not implemented for."""
    if width % 2 or width < 4:
        raise UnsupportedError(
            "d_model: sinusoidal positions are implemented for even widths of 4 or more, found "
            f"{width}"
        )


def refuse_layerdrop(config: Any, names: Sequence[str], key: Array | None) -> None:
    """Raises UnsupportedError in training, which has a dropout key, if a rate is above 0."""
    for name in names:
        rate = getattr(config, name)
        if rate and key is not None:
            raise UnsupportedError(
                f"{name}: training with LayerDrop is not implemented, found {rate}; to train "
                f'without it: load(..., config={{"{name}": 0}}) or --config {name}=0'
            )


class Positions(nnx.Module):
    """Adds positions to token embeddings, and normalises the sums if the family has a norm.

    `embed` is the token embedding of this side, if the sides have one each (Marian).
    """

    def __init__(
        self,
        positions: Embedding | Sinusoids,
        offset: int,
        norm: LayerNorm | RMSNorm | None,
        embed: Embedding | None,
    ):
        self.positions, self.offset, self.norm, self.embed = positions, offset, norm, embed

    def __call__(
        self,
        x: Float[Array, "B T D"],
        view: AttentionView,
        ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        positions = view.positions + self.offset
        # M2M100 gives no position to a pad token, even to one that no mask hides.
        pad = self.positions.zero_row if isinstance(self.positions, Sinusoids) else None
        if ids is not None and pad is not None:
            mask = view.visible
            if isinstance(mask, SequenceMask) and mask.query_segments is None:
                counted = (ids == pad) & mask.keys  # tokens after them have the positions of before
                positions = positions - jnp.cumsum(counted, axis=1, dtype=jnp.int32)
            positions = jnp.where(ids == pad, pad, positions)
        x = x + self.positions(positions).astype(x.dtype)
        return x if self.norm is None else self.norm(x)


class FairseqLayers(LayerFactory):
    """Builds token embeddings that may be scaled, and whose pad token is not trained."""

    def tokens(self) -> Embedding:
        c = self.config
        scale = c.d_model**0.5 if c.scale_embedding else None
        return self.embedding(c.vocab_size, c.d_model, scale=scale, padding_id=c.pad_token_id)


@dataclasses.dataclass(frozen=True)
class AbsoluteLayers(FairseqLayers):
    """Builds the layers of one side."""

    side: Side

    @property
    def heads(self) -> int:
        return getattr(self.config, f"{self.side}_attention_heads")

    @property
    def inner(self) -> int:
        return getattr(self.config, f"{self.side}_ffn_dim")

    def positions(self) -> Positions:
        c, learned = self.config, self.config.sinusoids is None
        rows = c.max_position_embeddings + c.position_offset
        table = self.embedding(rows, c.d_model) if learned else c.sinusoids
        embed = self.tokens() if self.side == "decoder" and c.separate_embeddings else None
        return Positions(table, c.position_offset, self.norm() if c.embedding_norm else None, embed)

    def stack(self) -> Stack:
        c, is_decoder = self.config, self.side == "decoder"
        clamps = c.pre_norm and not is_decoder and self.options.dtype == jnp.float16
        options = {
            "norm_last": not c.pre_norm,
            "dropout_rate": c.dropout,
            "clamp": clamp_to_float16 if clamps else None,
        }
        depth = range(getattr(c, f"{self.side}_layers"))
        blocks = [self.plain_block(cross=is_decoder, **options) for _ in depth]
        final = self.norm() if c.pre_norm else None
        return Stack(blocks, final, embedding_dropout=c.dropout, **self.options.stack)


class AbsoluteEncoderDecoderLM(EncoderDecoderLM[C]):
    """Encoder-decoder with absolute positions and LM head."""

    has_logits_bias: ClassVar[bool] = True
    """True: `final_logits_bias`, a constant that is not trained, is added to the logits."""

    def __init__(self, config: C, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        make = {
            side: AbsoluteLayers(config, options, rngs, side) for side in ("encoder", "decoder")
        }
        self.shared = make["encoder"].tokens()
        self.encoder_input = make["encoder"].positions()
        self.decoder_input = make["decoder"].positions()
        self.encoder, self.decoder = make["encoder"].stack(), make["decoder"].stack()
        self.lm_head = lm_head(config, options, rngs, std=config.init_std)
        bias = jnp.zeros((1, config.vocab_size), options.param_dtype)
        self.final_logits_bias = nnx.Param(bias) if self.has_logits_bias else None

    @property
    def decoder_embedding(self) -> Embedding:
        embed = self.decoder_input.embed
        return self.shared if embed is None else embed

    def embed_inputs(
        self,
        x: Float[Array, "B T D"],
        view: AttentionView,
        side: Side,
        ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        return (self.encoder_input if side == "encoder" else self.decoder_input)(x, view, ids)

    def _states(
        self, inputs: Seq2SeqInputs, labels: object, keys: Sequence[Array | None], **records: Any
    ) -> tuple[Encoded, StackOutput]:
        refuse_layerdrop(self.config, ("encoder_layerdrop", "decoder_layerdrop"), keys[0])
        embeds, scale = inputs.decoder_inputs_embeds, self.decoder_embedding.scale
        if embeds is not None and scale is not None and self.config.scales_decoder_embeds:
            inputs = dataclasses.replace(inputs, decoder_inputs_embeds=jnp.asarray(embeds) * scale)
        return super()._states(inputs, labels, keys, **records)

    def resized_constants(self, size: int) -> dict[str, jax.Array]:
        if self.final_logits_bias is None:
            return {}
        old = self.final_logits_bias[...]
        new = jnp.zeros((1, max(0, size - old.shape[1])), old.dtype)
        return {"final_logits_bias": jnp.concatenate([old[:, :size], new], axis=1)}

    @property
    def head(self) -> Head:
        bias = self.final_logits_bias
        return dataclasses.replace(super().head, bias=None if bias is None else bias[...])


def absolute_table(config: AbsoluteConfig) -> Table:
    """Weight table of BART and its relatives."""
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
        constants=() if config.sinusoids is None else sinusoid_tables(config.sinusoids),
    )


def sinusoid_tables(sinusoids: Sinusoids) -> tuple[tuple[str, Any], ...]:
    """`Table.constants` of the positions, which old files hold, and Pegasus's do today."""
    return ((r"(model\.)?((encoder|decoder)\.)?embed_positions\.weights?", sinusoids.table),)


def _side(side: Side) -> Iterator[Entry]:
    parts = {"attn": "self_attn", **({"cross": "encoder_attn"} if side == "decoder" else {})}
    yield from same(f"{side}_input.positions.weight", f"model.{side}.embed_positions.weight")
    yield from norm(f"{side}_input.norm", f"model.{side}.layernorm_embedding", bias=True)
    yield from attention_and_mlp(f"{side}.blocks.{{i}}", f"model.{side}.layers.{{i}}", parts)
    yield from norm(f"{side}.norm", f"model.{side}.layer_norm", bias=True)
