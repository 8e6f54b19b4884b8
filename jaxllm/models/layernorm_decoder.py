"""Base of decoders with LayerNorm and a plain feed-forward layer: GPT-2 and its relatives.

A family has config fields with its own names, and defines its transformer block in `block`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxllm.cache.attention_view import AttentionView
from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.build_options import Options
from jaxllm.models.decoder_only import Backbone
from jaxllm.nn.attention import Attention, Scores
from jaxllm.nn.block import Block, Stack
from jaxllm.nn.linear import Embedding, LayerNorm, Linear
from jaxllm.nn.mlp import MLP, activation
from jaxllm.nn.rope import Rope

NAMES = {
    "width": ("n_embd", "hidden_size"),
    "layers": ("n_layer", "num_layers", "num_hidden_layers"),
    "heads": ("n_head", "num_heads", "num_attention_heads"),
    "positions": ("n_positions", "max_position_embeddings"),
    "inner": ("n_inner", "intermediate_size", "ffn_dim"),
    "activation": ("activation_function",),
    "epsilon": ("layer_norm_epsilon",),
    "dropout": ("resid_pdrop", "resid_dropout", "hidden_dropout", "dropout"),
    "embedding_dropout": ("embd_pdrop", "embed_dropout"),
    "attention_dropout": ("attn_pdrop", "attention_dropout"),
    "bias": ("enable_bias",),
    "affine": ("layer_norm_elementwise_affine",),
}
"""What a config field says -> its names in the families, each of which has one of them or none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig(cfg.DecoderOnlyConfig):
    """Config with the field names of config.json, which differ between these families (`NAMES`)."""

    tie_word_embeddings: bool = True

    @classmethod
    def field(cls, what: str) -> str | None:
        """Name of the field that says `what`, a key of `NAMES`; None: the family has none."""
        own = {field.name for field in dataclasses.fields(cls)}
        return next((name for name in NAMES[what] if name in own), None)

    def value(self, what: str, default: Any) -> Any:
        """Value of the field that says `what`; the default if the family has no such field."""
        name = self.field(what)
        return default if name is None else getattr(self, name)

    @property
    def heads(self) -> int:
        return self.value("heads", 1)

    @property
    def hidden(self) -> int:
        """Size of the hidden states within the blocks."""
        return self.value("width", 0)

    @property
    def width(self) -> int:
        return self.hidden

    @property
    def size_per_head(self) -> int:
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Size of the hidden layer of the feed-forward layer."""
        return self.value("inner", None) or 4 * self.hidden

    @property
    def head_counts(self) -> dict[str, int]:
        return {self.field("heads") or "": self.heads}

    @property
    def max_positions(self) -> int | None:
        return self.value("positions", None)

    @property
    def context_length(self) -> int | None:
        return self.value("positions", None)

    def forward_values(self) -> dict[str, Any]:
        name = self.field("inner")
        return super().forward_values() | ({} if name is None else {name: self.inner})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
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
        names = {what: name for what in NAMES if (name := self.field(what)) is not None}
        checks.check_size(self, names["layers"], limit=checks.MAX_LAYERS)
        for what in ("width", "heads", "positions", "inner"):
            if what in names and getattr(self, names[what]) is not None:
                checks.check_size(self, names[what])
        checks.check_divides(self, names["width"], names["heads"])
        checks.check_rate(self, *(name for what, name in names.items() if "dropout" in what))
        checks.check_positive(self, "initializer_range")
        if "epsilon" in names:
            checks.check_positive(self, names["epsilon"])
        if "activation" in names:
            activation(self.value("activation", None), where=names["activation"])


C = TypeVar("C", bound=LayerNormConfig)


@dataclasses.dataclass(frozen=True)
class LayerFactory:
    """Builds the layers of a block with the sizes and dtypes of one model."""

    config: LayerNormConfig
    options: Options
    rngs: nnx.Rngs | None

    def linear(self, inputs: int, outputs: int, *, bias: bool | None = None) -> Linear:
        has_bias = self.config.value("bias", default=True) if bias is None else bias
        std, dtypes = self.config.initializer_range, self.options.dtypes
        return Linear(inputs, outputs, use_bias=has_bias, std=std, rngs=self.rngs, **dtypes)

    def embedding(self, rows: int, features: int) -> Embedding:
        std = self.config.initializer_range
        return Embedding(rows, features, std=std, rngs=self.rngs, **self.options.dtypes)

    def norm(self) -> LayerNorm:
        c = self.config
        options = {"eps": c.value("epsilon", 1e-5), "affine": c.value("affine", default=True)}
        return LayerNorm(c.hidden, **options, **self.options.dtypes)

    def attention(
        self,
        *,
        bias: bool | None = None,
        output_bias: bool | None = None,
        scale: float | None = None,
        window: int | None = None,
        rope: Rope | None = None,
    ) -> Attention:
        """Multi-head attention. `bias`: of q, k and v; by default all layers have one, unless the
        config says otherwise. `scale`: of the products, by default 1 / sqrt(head size)."""
        c, D = self.config, self.config.hidden
        return Attention(
            q=self.linear(D, D, bias=bias),
            k=self.linear(D, D, bias=bias),
            v=self.linear(D, D, bias=bias),
            o=self.linear(D, D, bias=output_bias),
            heads=c.heads,
            kv_heads=c.heads,
            head_dim=c.size_per_head,
            scores=Scores(c.size_per_head**-0.5 if scale is None else scale),
            dropout_rate=c.value("attention_dropout", 0.0),
            implementation=self.options.attn_implementation,
            window=window,
            rope=rope,
        )

    def mlp(self) -> MLP:
        c = self.config
        act = activation(c.value("activation", "gelu_new"), where="activation")
        return MLP(self.linear(c.hidden, c.inner), self.linear(c.inner, c.hidden), act)


class LayerNormDecoder(Backbone[C]):
    """Backbone with LayerNorm, and with learned positions if the config limits them.

    A family defines `block`.
    """

    position_offset: ClassVar[int] = 0
    """Rows of the table of positions before the first one, which are not used."""
    token_types: ClassVar[bool] = False
    """True if there are token types; they share the token embedding, as in transformers."""
    positions: Embedding | None

    def __init__(self, config: C, options: Options, *, rngs: nnx.Rngs | None):
        make = LayerFactory(config, options, rngs)
        self.config, self.max_positions = config, config.max_positions
        self.embed = make.embedding(config.vocab_size, config.width)
        rows = (config.max_positions or 0) + self.position_offset
        has_table = config.max_positions is not None
        self.positions = make.embedding(rows, config.hidden) if has_table else None
        self.stack = Stack(
            [self.block(make, layer) for layer in range(config.value("layers", 0))],
            self.final_norm(make),
            position_bias=self.position_bias(make),
            embedding_dropout=config.value("embedding_dropout", 0.0),
            **options.stack,
        )
        self.config = config.forward_part()

    def block(self, make: LayerFactory, layer: int) -> Block:
        """Builds block number `layer`."""
        raise NotImplementedError

    def final_norm(self, make: LayerFactory) -> LayerNorm | None:
        """Builds the norm after the last block."""
        return make.norm()

    def position_bias(self, make: LayerFactory) -> Sequence[nnx.Module]:
        """Builds the biases of attention (`Stack`): none."""
        return ()

    def embed_tokens(
        self,
        input_ids: Int[Array, "B T"] | None,
        inputs_embeds: Float[Array, "B T E"] | None,
        view: AttentionView,
        token_type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        types = token_type_ids if self.token_types else None
        others = None if self.token_types else token_type_ids  # refused
        x = self.block_input(super().embed_tokens(input_ids, inputs_embeds, view, others))
        if self.positions is not None:
            x = x + self.positions(view.positions + self.position_offset)
        return x if types is None else x + self.embed(types)

    def block_input(self, x: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Token embeddings as the first block reads them, but for their positions."""
        return x
