"""T5Gemma (Zhang et al. 2025, arXiv:2504.06225): an encoder-decoder of Gemma 2's layers.

Encoder and decoder have configs and token embeddings of their own. Tokens of the encoder attend to
both sides, in layers with a window to `sliding_window` tokens on either side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.cache.attention_view import AttentionView
from jaxllm.common.errors import ConfigError, JaxLLMError, UnsupportedError, quoted
from jaxllm.models import config as cfg
from jaxllm.models.backbone import lm_head
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.encoder_decoder import EncoderDecoderLM, Side
from jaxllm.models.gemma2 import Gemma2Config, Gemma2Layers
from jaxllm.models.weights import Entry, Table, linear, norm, same
from jaxllm.nn.block import Stack
from jaxllm.nn.linear import Embedding

SIDE = Gemma2Config()
SIDES: tuple[Side, Side] = ("encoder", "decoder")
INERT = frozenset({"classifier_dropout_rate", "initializer_range"})
"""Keys of a class that is not here, and for initial weights, for which each side has its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5GemmaConfig(cfg.ModelConfig):
    """T5Gemma config, with the field names of config.json, which are Gemma 2's in each side.

    The decoder starts with its `bos_token_id`. Tokens that the top level lacks are the decoder's.
    """

    model_type = "t5gemma"
    is_encoder_decoder: ClassVar[bool] = True
    derived = frozenset(SIDES)

    encoder: Gemma2Config = SIDE
    decoder: Gemma2Config = SIDE
    vocab_size: int = 256000
    dropout_rate: float = 0.0
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    decoder_start_token_id: int | None = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        common = {"vocab_size": self.vocab_size, "attention_dropout": self.attention_dropout}
        common["tie_word_embeddings"] = SIDE.tie_word_embeddings  # the top level's acts
        for side in SIDES:
            object.__setattr__(self, side, dataclasses.replace(getattr(self, side), **common))

    @property
    def width(self) -> int:
        return self.decoder.width

    @property
    def encoder_width(self) -> int:
        return self.encoder.width

    @property
    def context_length(self) -> int | None:
        return self.decoder.context_length

    @property
    def logit_softcap(self) -> float | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.decoder.logit_softcap

    @property
    def head_counts(self) -> dict[str, int]:
        counts = [(side, getattr(self, side).head_counts) for side in SIDES]
        return {f"{side}.{name}": own[name] for side, own in counts for name in own}

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {x: getattr(self, x).forward_part() for x in SIDES}

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        return cls.derived | INERT

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        sides = {side: _side_of(raw, side) for side in SIDES}
        tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
        absent = {name: getattr(sides["decoder"], name) for name in ("vocab_size", *tokens)}
        absent["decoder_start_token_id"] = start = sides["decoder"].bos_token_id
        given = {name: value for name, value in raw.items() if value is not None}
        config = cfg.read_config(cls, absent | given)
        _check_equal("decoder_start_token_id", config, "decoder.bos_token_id", start)
        for side in SIDES:
            own = {"vocab_size": sides[side].vocab_size, **raw.get(side, {})}
            for name in {"vocab_size", "dropout_rate", "attention_dropout"} & own.keys():
                _check_equal(name, config, f"{side}.{name}", own[name])
        width = sides["encoder"].width
        memory = raw.get("decoder", {}).get("cross_attention_hidden_size")
        if memory not in (None, width):
            raise ConfigError(
                f"decoder.cross_attention_hidden_size: {quoted(memory)} contradicts "
                f"encoder.hidden_size, {width}"
            )
        config = dataclasses.replace(config, **sides)
        config.check()
        cfg.check_token_ids(config)
        return config

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw = super().to_json(model_type, architecture)
        for side in SIDES:
            raw[side] = getattr(self, side).to_json("t5_gemma_module", architecture)
            raw[side]["dropout_rate"] = self.dropout_rate
            del raw[side]["architectures"]
        return raw

    def check(self) -> None:
        super().check()
        for side in SIDES:
            getattr(self, side).check()
            if getattr(self, side).rotary.uses_length:
                raise UnsupportedError(f"{side}.rope_type: dynamic and longrope RoPE are not here")


def _side_of(raw: Mapping[str, Any], side: Side) -> Gemma2Config:
    """Reads the config of one side, without `dropout_rate`, which Gemma 2 does not have."""
    own = {} if raw.keys() == {"model_type"} else raw.get(side)  # the defaults of both sides
    if own is None:
        raise ConfigError(f"{side}: missing")
    if not isinstance(own, Mapping):
        raise ConfigError(f"{side}: expected an object, found {quoted(own)}")
    own = {name: value for name, value in own.items() if name != "dropout_rate"}
    try:
        return Gemma2Config.from_dict({"model_type": "t5_gemma_module", **own})
    except JaxLLMError as error:
        raise type(error)(f"{side}.{error}") from None


def _check_equal(name: str, config: T5GemmaConfig, other: str, expected: Any) -> None:
    if expected not in (None, found := getattr(config, name)):
        raise ConfigError(f"{other}: {quoted(expected)} contradicts {name}, {quoted(found)}")


class T5GemmaForConditionalGeneration(EncoderDecoderLM[T5GemmaConfig]):
    """T5Gemma with LM head. `lm_head` None: tied to the decoder's embedding."""

    def __init__(self, config: T5GemmaConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        self.shared, self.encoder = self._make("encoder", options, rngs)
        embed, self.decoder = self._make("decoder", options, rngs)
        self.decoder_input = nnx.Dict(embed=embed)
        self.lm_head = lm_head(config, options, rngs, std=config.decoder.initializer_range)

    def _make(self, side: Side, options: Options, rngs: Any) -> tuple[Embedding, Stack]:
        """Embedding and stack of one side."""
        own: Gemma2Config = getattr(self.config, side)
        make = Gemma2Layers(own, options, rngs)
        memory, rate = self.config.encoder_width, self.config.dropout_rate
        blocks = []
        for layer in range(own.num_hidden_layers):
            attn = make.attention(window=own.window(layer))
            cross = make.attention(memory=memory) if side == "decoder" else None
            blocks.append(make.block(attn, cross, dropout_rate=rate))
        dropouts = {"embedding_dropout": rate, "output_dropout": rate}
        embed = make.embedding(own.vocab_size, own.width)
        return embed, Stack(blocks, make.norm(), **dropouts, **options.stack)

    @property
    def embedding(self) -> Embedding:
        return self.decoder_input.embed

    def embed_inputs(
        self,
        x: Float[Array, "B T D"],
        view: AttentionView,
        side: Side,
        ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        return x * jnp.asarray(x.shape[-1] ** 0.5, x.dtype)


def _entries(side: Side, embedding: str) -> Iterator[Entry]:
    layer, hf = f"{side}.blocks.{{i}}", f"model.{side}.layers.{{i}}"
    parts = {"attn": "self_attn", **({"cross": "cross_attn"} if side == "decoder" else {})}
    yield from same(f"{embedding}.weight", f"model.{side}.embed_tokens.weight")
    for ours, theirs in parts.items():
        for x in "qkvo":
            yield from linear(f"{layer}.{ours}.{x}", f"{hf}.{theirs}.{x}_proj")
    for x in ("gate", "up", "down"):
        yield from linear(f"{layer}.mlp.{x}", f"{hf}.mlp.{x}_proj")
    for ours, theirs in (*parts.items(), ("mlp", "feedforward")):
        yield from norm(f"{layer}.{ours}_norm", f"{hf}.pre_{theirs}_layernorm")
        yield from norm(f"{layer}.{ours}_post_norm", f"{hf}.post_{theirs}_layernorm")
    yield from norm(f"{side}.norm", f"model.{side}.norm")


T5GEMMA_TABLE = Table(
    (
        *_entries("encoder", "shared"),
        *_entries("decoder", "decoder_input.embed"),
        *same("lm_head.weight", "lm_head.out_proj.weight"),
    ),
    prefix="model.",
    copies=((r"lm_head\.out_proj\.weight", "decoder_input.embed.weight"),),
)
