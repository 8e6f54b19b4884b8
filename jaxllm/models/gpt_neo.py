"""GPT-Neo (Black et al. 2021, https://github.com/EleutherAI/gpt-neo).

GPT-2 with a window in every other layer, and products of queries and keys that are not scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models import config_checks as checks
from jaxllm.models.backbone import Backbone, LayerFactory
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.gpt2 import GPT_TABLE, HF_LAYER, LAYER, LayerNormConfig
from jaxllm.models.weights import linear, projections
from jaxllm.nn.attention import Scores
from jaxllm.nn.block import Block

GLOBAL, LOCAL = "global", "local"
"""Entries of `attention_layers`: a layer without a window, and with one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(LayerNormConfig):
    """GPT-Neo config, with the field names of config.json.

    `attention_layers` has an entry for each layer; files also have it in a shorter form,
    `attention_types`.
    """

    model_type = "gpt_neo"
    unread = (*LayerNormConfig.unread, "attention_layers", "window_size")
    attribute_map: ClassVar[Mapping[str, str]] = {
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
    }

    vocab_size: int = 50257
    max_position_embeddings: int = 2048
    hidden_size: int = 2048
    num_layers: int = 24
    attention_layers: tuple[str, ...] = (GLOBAL, LOCAL) * 12
    num_heads: int = 16
    intermediate_size: int | None = None
    window_size: int = 256
    activation_function: str = "gelu_new"
    resid_dropout: float = 0.0
    embed_dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256

    def window(self, layer: int) -> int | None:
        """Attention window of this layer in tokens, the query's own included; None: no window."""
        return self.window_size if self.attention_layers[layer] == LOCAL else None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        others = {key: value for key, value in raw.items() if key != "attention_types"}
        types = raw.get("attention_types")
        if types is None:
            return super().from_dict(others)
        kinds = expanded_types(types)
        if others.get("attention_layers") not in (None, kinds):
            raise ConfigError(
                f"attention_layers: {quoted(others['attention_layers'])} contradicts "
                f"attention_types, {quoted(types)}; remove one of them"
            )
        return super().from_dict({**others, "attention_layers": kinds})

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw = super().to_json(model_type, architecture)
        return raw | {"attention_types": [[raw["attention_layers"], 1]]}

    def check(self) -> None:
        super().check()
        kinds = self.attention_layers
        if len(kinds) != self.num_layers or not {GLOBAL, LOCAL}.issuperset(kinds):
            raise ConfigError(
                f"attention_layers: expected {GLOBAL} or {LOCAL} for each of {self.num_layers} "
                f"layers (num_layers), found {quoted(kinds)}"
            )


def expanded_types(types: Any) -> list[str]:
    """The kind of each layer, from `attention_types`: lists of kinds and how often they repeat.

    >>> expanded_types([[["global", "local"], 2]])
    ['global', 'local', 'global', 'local']
    """
    try:
        # Counts are limited, since a file may have any.
        counted = [list(kinds) * min(count, checks.MAX_LAYERS) for kinds, count in types]
        return [kind for kinds in counted for kind in kinds]
    except (TypeError, ValueError):
        raise ConfigError(
            f'attention_types: expected [[["global", "local"], 12]], found {quoted(types)}'
        ) from None


class GPTNeoBackbone(Backbone[GPTNeoConfig]):
    """GPT-Neo backbone: GPT-2's with windows, without scaled scores and biases of q, k and v."""

    token_types = True

    def block(self, make: LayerFactory, layer: int) -> Block:
        options = {"scores": Scores(1.0), "window": self.config.window(layer)}
        attn = make.attention(bias=False, **options)
        dropout = self.config.resid_dropout
        return Block(make.norm(), attn, make.norm(), make.mlp(), dropout_rate=dropout)


class GPTNeoModel(DecoderOnlyModel):
    backbone_class = GPTNeoBackbone


class GPTNeoForCausalLM(CausalLM):
    backbone_class = GPTNeoBackbone


class GPTNeoForSequenceClassification(SequenceClassifier):
    backbone_class = GPTNeoBackbone


GPT_NEO_TABLE = GPT_TABLE.with_entries(
    *projections(f"{LAYER}.attn", f"{HF_LAYER}.attn.attention"),
    *linear(f"{LAYER}.mlp.up", f"{HF_LAYER}.mlp.c_fc"),
    *linear(f"{LAYER}.mlp.down", f"{HF_LAYER}.mlp.c_proj"),
)
