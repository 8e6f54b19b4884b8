"""Pegasus (Zhang et al. 2019, arXiv:1912.08777): summaries.

An encoder-decoder with sinusoidal positions, and norms before each sublayer and at the end of each
side.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxllm.models.absolute_encoder_decoder import (
    AbsoluteConfig,
    AbsoluteEncoderDecoderLM,
    absolute_table,
)
from jaxllm.models.weights import Table
from jaxllm.nn.positions import Sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class PegasusConfig(AbsoluteConfig):
    """Pegasus config, with the field names of config.json."""

    model_type = "pegasus"
    pre_norm: ClassVar[bool] = True
    scales_decoder_embeds: ClassVar[bool] = True

    pad_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    decoder_start_token_id: int | None = 0

    @property
    def sinusoids(self) -> Sinusoids:
        return Sinusoids(self.d_model, steps=self.d_model // 2)


class PegasusForConditionalGeneration(AbsoluteEncoderDecoderLM[PegasusConfig]):
    """Pegasus with LM head, whose matrix is the token embedding."""


def pegasus_table(config: PegasusConfig) -> Table:
    """Weight table of Pegasus, whose files hold the positions."""
    names = [f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")]
    tables = tuple((name, config.max_position_embeddings) for name in names)
    return dataclasses.replace(absolute_table(config), new_constants=tables)
