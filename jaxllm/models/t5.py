"""T5 (Raffel et al. 2019, arXiv:1910.10683): variants v1.0, v1.1 / Flan, mT5 and umT5."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.backbone import LayerFactory, lm_head
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.encoder_decoder import EncoderDecoderLM, EncoderModel, Side, WithEncoder
from jaxllm.models.weights import Entry, Table, norm, same
from jaxllm.nn.attention import Scores
from jaxllm.nn.block import Block, Stack, clamp_to_float16
from jaxllm.nn.linear import RMSNorm
from jaxllm.nn.mlp import MLP, GatedMLP, activation
from jaxllm.nn.positions import RelativeBias

# `n_positions`, in the first files, is the length of pretraining, not a limit.
# `scalable_attention` of umT5 never had an effect.
HANDLED = frozenset({"n_positions", "scalable_attention"})
# Defaults of missing keys per model_type, where they differ from the class's.
ABSENT = {
    "mt5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {"feed_forward_proj": "gated-gelu"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(cfg.ModelConfig):
    """T5 config, with the field names of config.json.

    `is_gated_act` and `dense_act_fn` follow from `feed_forward_proj` unless they are set.
    Two fields need care. `tie_word_embeddings` is corrected by the loader: a checkpoint with an
    `lm_head.weight` that differs from the embedding is not tied, one without is.
    `scale_decoder_outputs` (the head's input times d_model**-0.5) is the file's value if it has
    one. Otherwise it is what the version of transformers that wrote the file computes. It is false
    if `tie_word_embeddings` is false, which transformers 4 writes for a head that is not scaled.
    Version 5 always writes true, and never scales the head of mT5. In other files of mT5 and umT5
    it is None: scaled if tied.
    """

    attribute_map: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    is_encoder_decoder: ClassVar[bool] = True
    derived = frozenset({"bias_per_layer"})
    unread = (*cfg.ModelConfig.unread, "initializer_factor", "feed_forward_proj")

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    bias_per_layer: bool = False
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    is_gated_act: bool | None = None
    dense_act_fn: str | None = None
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool | None = True
    pad_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    decoder_start_token_id: int | None = None

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def scaled(self) -> bool:
        """True if the input of the LM head is scaled."""
        scale = self.scale_decoder_outputs
        return self.tie_word_embeddings if scale is None else scale

    @property
    def gated(self) -> bool:
        gated = self.is_gated_act
        return self.feed_forward_proj.startswith("gated-") if gated is None else gated

    @property
    def act(self) -> str:
        """Name of the activation; `gated-gelu` has always meant the tanh GELU."""
        if self.dense_act_fn is not None:
            return self.dense_act_fn
        name = self.feed_forward_proj.removeprefix("gated-")
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else name

    @property
    def model_type(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "umt5" if self.bias_per_layer else "t5"

    def forward_values(self) -> dict[str, Any]:
        return super().forward_values() | {
            "num_decoder_layers": self.decoder_layers,
            "is_gated_act": self.gated,
            "dense_act_fn": self.act,
            "scale_decoder_outputs": self.scaled,
        }

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        if self.bias_per_layer:
            model_type, architecture = "umt5", architecture.replace("T5", "UMT5", 1)
        raw = super().to_json(model_type, architecture)
        del raw["bias_per_layer"]
        for name in ("is_gated_act", "dense_act_fn"):
            if raw[name] is None:  # transformers takes null for a value
                del raw[name]
        raw["scale_decoder_outputs"] = self.scaled
        raw["is_encoder_decoder"] = "Encoder" not in architecture
        return raw

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        return HANDLED

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        model_type = raw.get("model_type")
        raw = {**ABSENT.get(str(model_type), {}), **raw}
        config = super().from_dict(raw)
        if raw.get("scale_decoder_outputs") is None:
            config = dataclasses.replace(config, scale_decoder_outputs=_implied_scale(raw))
        if model_type == "umt5":
            config = dataclasses.replace(config, bias_per_layer=True)
        if config.decoder_start_token_id is None:
            # The T5 papers' convention, and transformers' fallback in training.
            config = dataclasses.replace(config, decoder_start_token_id=config.pad_token_id)
        return config

    def check(self) -> None:
        super().check()
        if self.decoder_layers != 0:  # 0: an encoder alone
            checks.check_size(self, "decoder_layers", limit=checks.MAX_LAYERS)
        buckets, distance = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        if not 4 <= buckets <= 2**16:
            raise ConfigError(
                f"relative_attention_num_buckets: expected 4 to 65536, found {quoted(buckets)}"
            )
        if not buckets // 2 < distance <= 2**20:
            raise ConfigError(
                f"relative_attention_max_distance: expected at most 2**20 and more than half of "
                f"relative_attention_num_buckets ({buckets // 2}), found {quoted(distance)}"
            )
        named = "feed_forward_proj" if self.dense_act_fn is None else "dense_act_fn"
        activation(self.act, where=named)


def _implied_scale(raw: Mapping[str, Any]) -> bool | None:
    """`scale_decoder_outputs` of a config.json without this field; see `T5Config`."""
    model_type, version = raw.get("model_type"), raw.get("transformers_version")
    if raw.get("tie_word_embeddings") is False:
        return False
    major = re.match(r"\d+", version) if isinstance(version, str) else None
    if major is not None and int(major[0]) >= 5:
        return model_type != "mt5"
    return None if model_type in ("mt5", "umt5") else True


def wo_dtypes(dtype: DTypeLike, param_dtype: DTypeLike) -> dict[str, Any]:
    """Dtypes of `wo`: float32 in place of float16, where T5's activations overflow.

    Its products stay in bfloat16, as in Hugging Face. In float32 they would take six passes on a
    TPU: two thirds of the time of a training step.
    """
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    return {name: jnp.float32 if jnp.dtype(x) == jnp.float16 else x for name, x in dtypes.items()}


class T5Layers(LayerFactory):
    """Builds RMSNorm, and layers without biases whose initial weights depend on their inputs."""

    has_biases = False

    def std(self, inputs: int) -> float:
        return self.config.initializer_factor * inputs**-0.5

    def norm(self, size: int | None = None) -> RMSNorm:
        c = self.config
        return RMSNorm(size or c.d_model, eps=c.layer_norm_epsilon, **self.options.dtypes)

    @property
    def scores(self) -> Scores:
        return Scores(1.0)  # the initial weights of q are scaled instead

    @property
    def q_std(self) -> float:
        c = self.config
        return c.initializer_factor * (c.d_model * c.d_kv) ** -0.5

    def mlp(self) -> MLP | GatedMLP:
        c = self.config
        act = activation(c.act, where="feed_forward_proj")
        up = self.linear(c.d_model, c.d_ff)
        down = self.linear(c.d_ff, c.d_model, **wo_dtypes(**self.options.dtypes))
        if not c.gated:
            return MLP(up, down, act, dropout_rate=c.dropout_rate)
        gate = self.linear(c.d_model, c.d_ff)
        return GatedMLP(gate, up, down, act, dropout_rate=c.dropout_rate)

    def block(self, *, decoder: bool) -> Block:
        return Block(
            self.norm(),
            self.attention(),
            self.norm(),
            self.mlp(),
            cross_norm=self.norm() if decoder else None,
            cross=self.attention() if decoder else None,
            dropout_rate=self.config.dropout_rate,
            clamp=clamp_to_float16 if jnp.dtype(self.options.dtype) == jnp.float16 else None,
        )

    def relative_bias(self, *, decoder: bool) -> RelativeBias:
        c = self.config
        return RelativeBias(
            c.relative_attention_num_buckets,
            c.relative_attention_max_distance,
            c.num_heads,
            bidirectional=not decoder,
            std=self.std(c.d_model),
            rngs=self.rngs,
            **self.options.dtypes,
        )

    def stack(self, *, decoder: bool) -> Stack:
        """Encoder, or decoder with cross-attention."""
        c = self.config
        depth = c.decoder_layers if decoder else c.num_layers
        biases = range(depth if c.bias_per_layer else 1)
        position_bias = [self.relative_bias(decoder=decoder) for _ in biases]
        return Stack(
            [self.block(decoder=decoder) for _ in range(depth)],
            self.norm(),
            position_bias=position_bias,
            embedding_dropout=c.dropout_rate,
            output_dropout=c.dropout_rate,
            **self.options.stack,
        )


class T5Encoder(WithEncoder[T5Config]):
    """Base of T5 models: shared embedding and encoder."""

    def __init__(self, config: T5Config, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        make = T5Layers(config, options, rngs)
        self.shared, self.encoder = make.tokens(), make.stack(decoder=False)


class T5EncoderModel(T5Encoder, EncoderModel[T5Config]):
    """T5 encoder only, for embeddings of sequences."""


class T5ForConditionalGeneration(T5Encoder, EncoderDecoderLM[T5Config]):
    """T5 encoder-decoder with LM head. `lm_head` None: tied embedding."""

    def __init__(self, config: T5Config, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config, options, rngs=rngs)
        if config.decoder_layers == 0:
            raise ConfigError("num_decoder_layers: 0 is an encoder alone: a T5EncoderModel")
        self.decoder = T5Layers(config, options, rngs).stack(decoder=True)
        self.lm_head = lm_head(config, options, rngs, std=config.initializer_factor)

    def scaled_for_head(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Scaling is independent of tying; see `T5Config`."""
        return x * self.config.d_model**-0.5 if self.config.scaled else x


def t5_table(*, gated: bool) -> Table:
    """Weight table of T5. v1.0 has one input matrix `wi`; gated: `wi_0` (gate) and `wi_1`."""
    dense = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    return Table(
        (
            *same("shared.weight", "shared.weight"),
            *_entries("encoder", {"attn": "SelfAttention"}, dense),
            *_entries("decoder", {"attn": "SelfAttention", "cross": "EncDecAttention"}, dense),
            *same("lm_head.weight", "lm_head.weight"),
        ),
        # Files of the first T5 models have a cross-attention bias that is never used.
        buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        copies=(
            (r"(encoder|decoder)\.embed_tokens\.weight", "shared.weight"),
            (r"lm_head\.weight", "shared.weight"),
        ),
    )


def _entries(side: Side, attention: Mapping[str, str], dense: Mapping[str, str]) -> Iterator[Entry]:
    """Entries of one side, whose sublayers are numbered in a file."""
    layer, hf = f"{side}.blocks.{{i}}", f"{side}.block.{{i}}.layer"
    bias = f"{hf}.0.SelfAttention.relative_attention_bias.weight"
    yield from same(f"{side}.position_bias.{{i}}.table.weight", bias)
    for number, (ours, theirs) in enumerate(attention.items()):
        yield from norm(f"{layer}.{ours}_norm", f"{hf}.{number}.layer_norm")
        for x in "qkvo":
            yield from same(f"{layer}.{ours}.{x}.weight", f"{hf}.{number}.{theirs}.{x}.weight")
    last = f"{hf}.{len(attention)}"
    yield from norm(f"{layer}.mlp_norm", f"{last}.layer_norm")
    for ours, theirs in dense.items():
        yield from same(f"{layer}.mlp.{ours}.weight", f"{last}.DenseReluDense.{theirs}.weight")
    yield from norm(f"{side}.norm", f"{side}.final_layer_norm")
