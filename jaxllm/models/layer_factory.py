"""Builds the layers of a model from its config and its build options."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from flax import nnx

from jaxllm.models.build_options import Options
from jaxllm.nn.attention import Attention, Scores
from jaxllm.nn.linear import Embedding, LayerNorm, Linear, RMSNorm
from jaxllm.nn.mlp import MLP, GatedMLP, activation
from jaxllm.nn.rope import Rope, without_unused


@dataclasses.dataclass(frozen=True)
class LayerFactory:
    """Builds layers with the sizes and dtypes of one model: those of GPT-2 and its relatives.

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
    def inner(self) -> int:
        """Size of the hidden layer of the feed-forward layer."""
        return self.config.value("inner", 4 * self.config.hidden)

    @property
    def rope(self) -> Rope | None:
        """RoPE of attention layers that are given no other."""
        return None

    def std(self, inputs: int) -> float:
        """Standard deviation of the initial weights of a linear layer."""
        return self.config.value("std", 0.02)

    def linear(
        self, inputs: int, outputs: int, *, bias: bool | None = None, **options: Any
    ) -> Linear:
        use_bias = self.config.value("bias", self.has_biases) if bias is None else bias
        made = {"std": self.std(inputs), "rngs": self.rngs, **self.options.dtypes}
        return Linear(inputs, outputs, use_bias=use_bias, **made | options)

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
        q_std: float | None = None,
    ) -> Attention:
        """Attention layer, with grouped queries if the config has fewer heads of keys and values.

        Args:
            bias: of q, k and v.
            normed_heads: a norm of each head's query and key.
            window: sliding-window attention.
            scores: by default products are divided by the square root of the head size.
            rope: by default the config's.
            memory: width of the encoder's states, for cross-attention, which has no RoPE.
            q_std: of the initial weights of q, where it is its own.
        """
        c, heads = self.config, self.heads
        size, kv_heads = c.value("head_size", c.hidden // heads), c.value("kv_heads", heads)
        read, rope = memory or c.hidden, None if memory else rope or self.rope
        own = {} if q_std is None else {"std": q_std}
        return Attention(
            q=self.linear(c.hidden, heads * size, bias=bias, **own),
            k=self.linear(read, kv_heads * size, bias=bias),
            v=self.linear(read, kv_heads * size, bias=bias),
            o=self.linear(heads * size, c.hidden, bias=output_bias),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            scores=scores or Scores(size**-0.5),
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

    def activation(self) -> Any:
        """Activation function of the feed-forward layer."""
        return activation(self.config.value("activation", "gelu_new"), where="activation")


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
