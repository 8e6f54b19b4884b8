"""Command R, Command R+ and Aya 23 (Cohere 2024, https://cohere.com/blog/command-r).

Llama with parallel attention and feed-forward layers, LayerNorm without biases, RoPE that rotates
pairs of neighbours, and logits that are multiplied by a constant.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel
from jaxllm.models.rotary_decoder import (
    HF_LAYER,
    LAYER,
    ROTARY_TABLE,
    RotaryConfig,
    RotaryLayers,
    RotaryModel,
)
from jaxllm.models.weights import Entry, Table, linear
from jaxllm.nn.block import Block
from jaxllm.nn.linear import RMSNorm
from jaxllm.nn.platform.products import standardized


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohereConfig(RotaryConfig):
    """Cohere config, with the field names of config.json.

    `logit_scale` multiplies the logits. With `use_qk_norm` the query and key of each head are
    normalized, with weights of the head's own.
    """

    model_type = "cohere"
    default_theta: ClassVar[float] = 500000.0
    # The norms have `layer_norm_eps`. A class variable removes the inherited field.
    rms_norm_eps: ClassVar[float] = 1e-5  # pyright: ignore[reportIncompatibleVariableOverride]

    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    max_position_embeddings: int = 8192
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    attention_bias: bool = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 5
    eos_token_id: int | tuple[int, ...] | None = 255001


class CenteredNorm(RMSNorm):
    """LayerNorm without a bias, which is RMSNorm of x minus its mean, in float32 to the end.

    For queries or keys [B, T, N, H] the weight holds the vectors of the N heads one after another.
    """

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        weight = self.weight[...].astype(jnp.float32).reshape(*[1] * (x.ndim - 2), -1, x.shape[-1])
        return (standardized(x.astype(jnp.float32), self.eps) * weight).astype(self.dtype)


class CohereLayers(RotaryLayers):
    """Builds norms that are `CenteredNorm`."""

    def norm(self, size: int | None = None) -> CenteredNorm:
        c = self.config
        return CenteredNorm(size or c.hidden_size, eps=c.layer_norm_eps, **self.options.dtypes)


class CohereBackbone(RotaryModel[CohereConfig]):
    """Cohere backbone: parallel attention and feed-forward layers, LayerNorm without biases."""

    layers = CohereLayers

    def block(self, make: RotaryLayers, layer: int) -> Block:
        c = self.config
        attn = make.attention()
        if c.use_qk_norm:
            attn.q_norm = nnx.data(make.norm(c.num_attention_heads * c.size_per_head))
            attn.k_norm = nnx.data(make.norm(c.kv_heads * c.size_per_head))
        return Block(make.norm(), attn, None, make.mlp())


class CohereModel(DecoderOnlyModel):
    backbone_class = CohereBackbone


class CohereForCausalLM(CausalLM):
    backbone_class = CohereBackbone

    def scaled_for_head(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        config: Any = self.config
        # In float32: a scale that is rounded to bfloat16 would be another temperature.
        return x.astype(jnp.float32) * config.logit_scale


def cohere_table(config: CohereConfig) -> Table:
    """Weight table, in which the rows of q and k depend on the sizes of heads.

    Cohere rotates pairs of neighbours. With the first features of all pairs before the second ones,
    the pairs are the same as in other families, and the scores do not change.
    """
    size, entries = config.size_per_head, []
    for name, heads in (("q", config.num_attention_heads), ("k", config.kv_heads)):
        pairs = np.arange(heads * size).reshape(heads, -1, 2)
        order = tuple(pairs.swapaxes(1, 2).flatten().tolist())
        ours, theirs = f"{LAYER}.attn.{name}", f"{HF_LAYER}.self_attn.{name}"
        entries += linear(ours, f"{theirs}_proj", order=order)
        entries.append(
            Entry((f"{ours}_norm.weight",), f"{theirs}_norm.weight", order=order, columns=size)
        )
    return ROTARY_TABLE.with_entries(*entries)
