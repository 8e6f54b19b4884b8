"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671 and arXiv:2412.15115).

Llama with biases in the query, key and value projections, and optionally with sliding-window
attention in the upper layers.
"""

from __future__ import annotations

import dataclasses

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.models import config_checks as checks
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.rotary_decoder import RotaryConfig, RotaryLayers, RotaryModel
from jaxllm.nn.block import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(RotaryConfig):
    """Qwen2 config.

    With `use_sliding_window`, layers `max_window_layers` and above have the window
    `sliding_window`; with `layer_types`, the layers of type "sliding_attention" do.
    """

    model_type = "qwen2"
    unread = (
        *RotaryConfig.unread,
        *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    )

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def window(self, layer: int) -> int | None:
        """Attention window of this layer in tokens, the query's own included; None: no window."""
        if not self.use_sliding_window:
            return None
        types = self.layer_types
        sliding = (
            layer >= self.max_window_layers if types is None else types[layer] == checks.SLIDING
        )
        return self.sliding_window if sliding else None

    def check(self) -> None:
        super().check()
        if self.max_window_layers < 0:
            found = self.max_window_layers
            raise ConfigError(f"max_window_layers: expected 0 or more, found {quoted(found)}")
        checks.check_layer_types(self.layer_types, self.num_hidden_layers)
        slides = checks.SLIDING in (self.layer_types or ())
        if slides and not (self.use_sliding_window and self.sliding_window):
            raise ConfigError(
                f"layer_types: {checks.SLIDING} needs use_sliding_window true and a sliding_window"
            )


class Qwen2Backbone(RotaryModel[Qwen2Config]):
    """Qwen2 backbone: Llama's blocks with biases of q, k and v, and windows if configured."""

    def block(self, make: RotaryLayers, layer: int) -> Block:
        attn = make.attention(bias=True, window=self.config.window(layer))
        return Block(make.norm(), attn, make.norm(), make.mlp())


class Qwen2Model(DecoderOnlyModel):
    backbone_class = Qwen2Backbone


class Qwen2ForCausalLM(CausalLM):
    backbone_class = Qwen2Backbone


class Qwen2ForSequenceClassification(SequenceClassifier):
    backbone_class = Qwen2Backbone
