"""GPT-J (Wang and Komatsuzaki 2021, https://github.com/kingoflolz/mesh-transformer-jax).

Blocks whose attention and feed-forward layer read the same norm, RoPE on a part of each head, and
an LM head with a bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxllm.common.errors import ConfigError, UnsupportedError
from jaxllm.models.backbone import Backbone, LayerFactory
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.gpt2 import GPT_TABLE, HF_LAYER, LAYER, GPT2Config, LayerNormConfig
from jaxllm.models.weights import Table, linear, projections
from jaxllm.nn.block import Block
from jaxllm.nn.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTJConfig(LayerNormConfig):
    """GPT-J config, with the field names of config.json."""

    model_type = "gptj"
    no_effect: ClassVar[Mapping[str, Any]] = {"rotary": True, "scale_attn_weights": True}
    unread = (*LayerNormConfig.unread, "n_positions")
    attribute_map = GPT2Config.attribute_map

    vocab_size: int = 50400
    n_positions: int = 2048
    n_embd: int = 4096
    n_layer: int = 28
    n_head: int = 16
    rotary_dim: int = 64
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256

    @property
    def max_positions(self) -> None:  # RoPE has no table
        return None

    def check(self) -> None:
        super().check()
        size = self.rotary_dim
        if size % 2 or not 2 <= size <= self.size_per_head:
            raise ConfigError(
                f"rotary_dim: expected an even part of a head, {self.size_per_head}, found {size}"
            )
        if self.tie_word_embeddings:
            raise UnsupportedError(
                "tie_word_embeddings: the head has a bias and its own matrix here, found true"
            )


class GPTJBackbone(Backbone[GPTJConfig]):
    """GPT-J backbone: parallel attention and feed-forward layers, RoPE."""

    token_types = True

    def block(self, make: LayerFactory, layer: int) -> Block:
        rope = Rope(head_dim=self.config.rotary_dim)
        attn = make.attention(bias=False, output_bias=False, rope=rope)
        return Block(make.norm(), attn, None, make.mlp(), dropout_rate=self.config.resid_pdrop)


class GPTJModel(DecoderOnlyModel):
    backbone_class = GPTJBackbone


class GPTJForCausalLM(CausalLM):
    backbone_class = GPTJBackbone
    head_bias = True


class GPTJForSequenceClassification(SequenceClassifier):
    backbone_class = GPTJBackbone


def gptj_table(config: GPTJConfig) -> Table:
    """Weight table, in which the rows of q and k depend on the sizes of heads.

    GPT-J rotates pairs of neighbours. With the first features of all pairs before the second ones,
    the pairs are the same as in other families, and the scores do not change.
    """
    R, heads = config.rotary_dim, np.arange(config.n_embd).reshape(config.n_head, -1)
    order = np.concatenate([heads[:, :R:2], heads[:, 1:R:2], heads[:, R:]], axis=1)
    rotated = tuple(order.flatten().tolist())
    table = GPT_TABLE.with_entries(
        *projections(f"{LAYER}.attn", f"{HF_LAYER}.attn", rotated=rotated),
        *linear(f"{LAYER}.mlp.up", f"{HF_LAYER}.mlp.fc_in"),
        *linear(f"{LAYER}.mlp.down", f"{HF_LAYER}.mlp.fc_out"),
        *linear("lm_head", "lm_head"),
    )
    return dataclasses.replace(table, copies=())
