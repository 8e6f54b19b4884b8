"""Base of decoders with LayerNorm and a plain feed-forward layer: GPT-2 and its relatives.

`LayerFactory` and `Backbone` are made for them. A family has config fields with its own names, and
defines its transformer block in `block`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.models import config as cfg
from jaxllm.models import config_checks as checks
from jaxllm.models.weights import Table, norm, same


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig(cfg.DecoderOnlyConfig):
    """Config with the field names of config.json, which differ between these families
    (`models.config.NAMES`)."""

    absent_tokens = (*cfg.DecoderOnlyConfig.absent_tokens, "pad_token_id")

    tie_word_embeddings: bool = True

    @property
    def max_positions(self) -> int | None:
        return self.value("positions", None)

    def forward_values(self) -> dict[str, Any]:
        name = self.field("inner")
        inner = {} if name is None else {name: self.value("inner", 4 * self.hidden)}
        return super().forward_values() | inner

    def check(self) -> None:
        super().check()
        checks.check_divides(self, self.field("width") or "", self.field("heads") or "")


LAYER, HF_LAYER = "backbone.stack.blocks.{i}", "transformer.h.{i}"
GPT_TABLE = Table(
    prefix="transformer.",
    entries=(
        *same("backbone.embed.weight", "transformer.wte.weight"),
        *same("backbone.positions.weight", "transformer.wpe.weight"),
        *norm(f"{LAYER}.attn_norm", f"{HF_LAYER}.ln_1", bias=True),
        *norm(f"{LAYER}.mlp_norm", f"{HF_LAYER}.ln_2", bias=True),
        *norm("backbone.stack.norm", "transformer.ln_f", bias=True),
        *same("lm_head.weight", "lm_head.weight"),
        *same("score.weight", "score.weight"),
    ),
    # Causal masks, which old files store as tensors.
    buffers=(r"(transformer\.)?h\.\d+\.(attn|crossattention|attn\.attention)\.(bias|masked_bias)",),
    copies=((r"lm_head\.weight", "backbone.embed.weight"),),
)
"""Weight table common to families with GPT-2's names, without attention and feed-forward layers."""
