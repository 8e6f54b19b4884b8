"""Backbones of decoder-only models, and the layers of all models, built from config and options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import AttentionView, SequenceMask
from jaxllm.cache.kv_cache import KV, Cache
from jaxllm.common.errors import InputError
from jaxllm.models.build_options import Options
from jaxllm.models.config import DecoderOnlyConfig
from jaxllm.nn.attention import Attention, Scores
from jaxllm.nn.block import Block, Context, Stack, StackOutput
from jaxllm.nn.linear import Embedding, LayerNorm, Linear, RMSNorm
from jaxllm.nn.mlp import MLP, Activation, GatedMLP, activation
from jaxllm.nn.positions import Sinusoids
from jaxllm.nn.rope import Rope, without_unused


@dataclasses.dataclass(frozen=True)
class LayerFactory:
    """Builds the layers of GPT-2 and its relatives, with the sizes and dtypes of one model.

    The sizes are config fields, whatever their names are in the family (`models.config.NAMES`).
    Subclasses build the layers of other families.
    """

    config: Any
    options: Options
    rngs: nnx.Rngs | None

    has_biases: ClassVar[bool] = True
    """Linear layers have a bias, unless config or caller say otherwise."""

    @property
    def heads(self) -> int:
        return self.config.value("heads", 1)

    @property
    def head_size(self) -> int:
        return self.config.value("head_size", self.config.hidden // self.heads)

    @property
    def inner(self) -> int:
        """Size of the hidden layer of the feed-forward layer."""
        return self.config.value("inner", 4 * self.config.hidden)

    @property
    def scores(self) -> Scores:
        """Scores of attention layers that are given no others: products of queries and keys,
        divided by the square root of the head size."""
        return Scores(self.head_size**-0.5)

    @property
    def rope(self) -> Rope | None:
        """RoPE of attention layers that are given no other."""
        return None

    @property
    def q_std(self) -> float | None:
        """Standard deviation of the initial weights of q; None: as of other layers."""
        return None

    def std(self, inputs: int) -> float:
        """Standard deviation of the initial weights of a linear layer."""
        return self.config.value("std", 0.02)

    def linear(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool | None = None,
        std: float | None = None,
        **dtypes: Any,
    ) -> Linear:
        return Linear(
            inputs,
            outputs,
            use_bias=self.config.value("bias", self.has_biases) if bias is None else bias,
            std=self.std(inputs) if std is None else std,
            rngs=self.rngs,
            **self.options.dtypes | dtypes,
        )

    def embedding(self, rows: int, features: int, **options: Any) -> Embedding:
        std, dtypes = self.config.value("std", 0.02), self.options.dtypes
        return Embedding(rows, features, std=std, rngs=self.rngs, **dtypes, **options)

    def tokens(self) -> Embedding:
        """Token embedding."""
        return self.embedding(self.config.vocab_size, self.config.width)

    def norm(self, size: int | None = None) -> LayerNorm | RMSNorm:
        """Norm over `size` features, the hidden size by default."""
        c = self.config
        options = {"eps": c.value("epsilon", 1e-5), "affine": c.value("affine", default=True)}
        return LayerNorm(size or c.hidden, **options, **self.options.dtypes)

    def attention(
        self,
        *,
        bias: bool | None = None,
        output_bias: bool | None = None,
        normed_heads: bool = False,
        window: int | None = None,
        scores: Scores | None = None,
        rope: Rope | None = None,
        memory: int | None = None,
    ) -> Attention:
        """Attention layer, with grouped queries if the config has fewer heads of keys and values.

        Args:
            bias: of q, k and v; by default the config's `attention_bias`, if it has that field.
            output_bias: of the output projection; the default is the same.
            normed_heads: a norm of each head's query and key.
            window: sliding-window attention.
            memory: width of the encoder's states, for cross-attention, which has no RoPE.
        """
        c, heads, size = self.config, self.heads, self.head_size
        kv_heads, read = c.value("kv_heads", heads), memory or c.hidden
        biases = [c.value("attention_bias", None) if x is None else x for x in (bias, output_bias)]
        rope = None if memory else rope or self.rope
        return Attention(
            q=self.linear(c.hidden, heads * size, bias=biases[0], std=self.q_std),
            k=self.linear(read, kv_heads * size, bias=biases[0]),
            v=self.linear(read, kv_heads * size, bias=biases[0]),
            o=self.linear(heads * size, c.hidden, bias=biases[1]),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            scores=scores or self.scores,
            dropout_rate=c.value("attention_dropout", 0.0),
            implementation=self.options.attn_implementation,
            q_norm=self.norm(size) if normed_heads else None,
            k_norm=self.norm(size) if normed_heads else None,
            window=window,
            rope=None if rope is None else without_unused(rope),
        )

    def mlp(self) -> MLP | GatedMLP:
        c, act = self.config, self.activation()
        up, down = self.linear(c.hidden, self.inner), self.linear(self.inner, c.hidden)
        return MLP(up, down, act, dropout_rate=c.value("activation_dropout", 0.0))

    def plain_block(self, *, cross: bool, scores: Scores | None = None, **options: Any) -> Block:
        """Block of attention, cross-attention if there is any, and a feed-forward layer.

        Args:
            scores: of attention and cross-attention.
            options: keyword arguments of `Block`.
        """
        mlp = self.mlp()
        return Block(
            self.norm(),
            self.attention(scores=scores),
            self.norm(),
            mlp,
            cross_norm=self.norm() if cross else None,
            cross=self.attention(scores=scores) if cross else None,
            **options,
        )

    def activation(self) -> Activation:
        """Activation function of the feed-forward layer."""
        return activation(self.config.value("activation", "gelu_new"), where="activation")


class EqualLayers:
    """A layer factory that returns one layer for all equal calls, where only shapes are needed.

    Making each layer of a deep model takes a quarter of a second.
    """

    def __init__(self, make: LayerFactory) -> None:
        self._make = make
        self._made: dict[object, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._make, name)
        if not inspect.ismethod(value):
            return value

        def made(*arguments: Any, **options: Any) -> Any:
            key = (name, arguments, frozenset(options.items()))
            if key not in self._made:
                self._made[key] = value(*arguments, **options)
            return self._made[key]

        return made


def lm_head(
    config: Any,
    options: Options,
    rngs: nnx.Rngs | None,
    *,
    std: float,
    bias: bool = False,
) -> Linear | None:
    """LM head with a matrix of its own; None if the config ties it to the token embedding."""
    if config.tie_word_embeddings:
        return None
    sizes = (config.width, config.vocab_size)
    return Linear(*sizes, use_bias=bias, std=std, rngs=rngs, **options.dtypes)


C = TypeVar("C", bound=DecoderOnlyConfig)


class Backbone(nnx.Module, Generic[C]):
    """Decoder-only model without head: embedding, positions, stack of blocks.

    A family defines `block`.
    """

    layers: ClassVar[type[LayerFactory]] = LayerFactory
    """Builds the layers."""
    position_offset: ClassVar[int] = 0
    """Number of the first token's position, before which a table may have other rows."""
    takes_position_ids: ClassVar[bool] = True
    """False: the family has no positions, only distances (ALiBi)."""
    token_types: ClassVar[bool] = False
    """True if there are token types; they share the token embedding, as in transformers."""

    def __init__(self, config: C, options: Options, *, rngs: nnx.Rngs | None):
        make: Any = self.layers(config, options, rngs)
        if rngs is None:
            make = EqualLayers(make)
        self.config, self.is_causal = config, config.is_causal
        self.max_positions = config.max_positions
        self.embed = make.tokens()
        self.positions = self.position_table(make)
        self.stack = Stack(
            [self.block(make, layer) for layer in range(config.value("layers", 0))],
            self.final_norm(make),
            position_bias=self.position_bias(make),
            embedding_dropout=config.embedding_dropout,
            **options.stack,
        )
        self.config = config.forward_part()

    def block(self, make: Any, layer: int) -> Block:
        """Builds block number `layer`."""
        raise NotImplementedError

    def final_norm(self, make: Any) -> LayerNorm | RMSNorm | None:
        """Builds the norm after the last block."""
        return make.norm()

    def position_table(self, make: Any) -> Embedding | Sinusoids | None:
        """Builds what is added to the token embeddings: learned positions, if their number is
        limited."""
        c = self.config
        if c.max_positions is None:
            return None
        return make.embedding(c.max_positions + self.position_offset, c.hidden)

    def position_bias(self, make: Any) -> Sequence[nnx.Module]:
        """Builds the biases of attention (`Stack`): none."""
        return ()

    def embed_tokens(
        self,
        input_ids: Int[Array, "B T"] | None,
        inputs_embeds: Float[Array, "B T E"] | None,
        view: AttentionView,
        token_type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        if token_type_ids is not None and not self.token_types:
            raise InputError("token_type_ids: only GPT-2, GPT-Neo and GPT-J have them")
        x = self.block_input(self.embed.from_ids_or_embeds(input_ids, inputs_embeds))
        if self.positions is not None:
            positions = self.positions(view.positions + self.position_offset)
            x = x + positions.astype(x.dtype)
        return x if token_type_ids is None else x + self.embed(token_type_ids)

    def block_input(self, x: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Token embeddings as the first block reads them, but for their positions."""
        return x

    def run(
        self,
        input_ids: Int[Array, "B T"] | None,
        view: AttentionView,
        *,
        inputs_embeds: Float[Array, "B T D"] | None = None,
        token_type_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        cross_kv: tuple[KV, ...] | None = None,
        cross_mask: Bool[Array, "B E"] | None = None,
        **options: Any,
    ) -> StackOutput:
        x = self.embed_tokens(input_ids, inputs_embeds, view, token_type_ids)
        context = Context(
            view=view,
            cross_visible=None if cross_mask is None else SequenceMask(cross_mask),
        )
        return self.stack(
            x, context, layers=None if cache is None else cache.layers, cross_kv=cross_kv, **options
        )
