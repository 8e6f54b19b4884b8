"""Gemma 3, the text model (Gemma Team 2025, arXiv:2503.19786), and EmbeddingGemma.

Gemma 2 with QK norm and without soft caps. Five of six layers have a window, and a RoPE of their
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.models import config_checks as checks
from jaxllm.models.decoder_only import CausalLM, DecoderOnlyModel, SequenceClassifier
from jaxllm.models.gemma2 import GEMMA2_TABLE, Gemma2Backbone, Gemma2Config
from jaxllm.models.rotary_decoder import HEAD_NORMS
from jaxllm.nn.rope import Rope

ROPES = (checks.FULL, checks.SLIDING)
"""Keys of the `rope_parameters` of transformers 5."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma2Config):
    """Gemma 3 config.

    Without `layer_types` every layer has a window except the last of each `sliding_window_pattern`.
    Layers with a window have RoPE of base `rope_local_base_freq`, the others have `rope`.
    With `use_bidirectional_attention` tokens attend to both sides, in layers with a window to
    ``sliding_window // 2`` tokens on either side (EmbeddingGemma).
    """

    model_type = "gemma3_text"
    unread = (*Gemma2Config.unread, "rope_local_base_freq", "sliding_window_pattern")
    attribute_map: ClassVar[Mapping[str, str]] = {
        **Gemma2Config.attribute_map,
        "_sliding_window_pattern": "sliding_window_pattern",
    }
    default_theta: ClassVar[float] = 1e6

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_local_base_freq: float = 10000.0
    sliding_window_pattern: int = 6
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None

    @property
    def is_causal(self) -> bool:
        return not self.use_bidirectional_attention

    def rope_of(self, layer: int) -> Rope | None:
        local = Rope(head_dim=self.size_per_head, theta=self.rope_local_base_freq)
        return local if self.slides(layer) else None

    def slides(self, layer: int) -> bool:
        if self.layer_types is None:
            return (layer + 1) % self.sliding_window_pattern != 0
        return super().slides(layer)

    def window(self, layer: int) -> int | None:
        window = super().window(layer)
        return window if window is None or self.is_causal else window // 2

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        return super().from_dict(_with_flat_ropes(raw))

    def check(self) -> None:
        super().check()
        if self.attn_logit_softcapping is not None:
            raise UnsupportedError(
                "attn_logit_softcapping: Gemma 3 has no soft cap of scores, and transformers does "
                f"not apply it, found {self.attn_logit_softcapping}; set it to null"
            )


def _with_flat_ropes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the names of transformers 4, from those of version 5.

    Version 5 has an object for each type of layer in `rope_parameters`.
    """
    nested = raw.get("rope_parameters")
    if nested is None:
        return dict(raw)
    if not isinstance(nested, Mapping) or not nested.keys() <= {*ROPES}:
        found = quoted(nested)
        raise ConfigError(f"rope_parameters: expected {' and '.join(ROPES)}, found {found}")
    for name, parameters in nested.items():
        if not isinstance(parameters, Mapping | None):
            found = quoted(parameters)
            raise ConfigError(f"rope_parameters.{name}: expected an object, found {found}")
    full, local = (dict(nested.get(name) or {}) for name in ROPES)
    theta = local.pop("rope_theta", None)
    if theta is not None and not (checks.is_float32_number(theta) and theta > 0):
        raise ConfigError(
            f"rope_parameters.{checks.SLIDING}.rope_theta: expected a number > 0, found "
            f"{quoted(theta)}"
        )
    if local.pop("rope_type", "default") != "default" or local:
        raise UnsupportedError(
            f"rope_parameters.{checks.SLIDING}: layers with a window have RoPE without scaling, "
            f"found {quoted(nested[checks.SLIDING])}"
        )
    base = raw.get("rope_local_base_freq")
    if theta is not None and base not in (None, theta):
        raise ConfigError(
            f"rope_local_base_freq: {quoted(base)} contradicts rope_parameters.{checks.SLIDING}."
            f"rope_theta, {quoted(theta)}"
        )
    flat = {"rope_parameters": full, "rope_local_base_freq": base if theta is None else theta}
    return {**raw, **flat}


class Gemma3Backbone(Gemma2Backbone):
    """Gemma 3 backbone: Gemma 2's blocks with RMSNorm of each head's query and key (QK norm)."""

    normed_heads = True


class Gemma3TextModel(DecoderOnlyModel):
    backbone_class = Gemma3Backbone


class Gemma3ForCausalLM(CausalLM):
    backbone_class = Gemma3Backbone


class Gemma3TextForSequenceClassification(SequenceClassifier):
    backbone_class = Gemma3Backbone


GEMMA3_TABLE = GEMMA2_TABLE.with_entries(*HEAD_NORMS)
