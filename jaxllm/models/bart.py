"""BART (Lewis et al. 2019, arXiv:1910.13461).

An encoder-decoder with learned positions, and norms after each sublayer.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxllm.models.absolute_encoder_decoder import (
    LEARNED_OFFSET,
    AbsoluteConfig,
    AbsoluteEncoderDecoderLM,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(AbsoluteConfig):
    """BART config, with the field names of config.json.

    `classifier_dropout` belongs to a class that is not here.
    """

    model_type = "bart"
    unread = (*AbsoluteConfig.unread, "classifier_dropout")
    embedding_norm: ClassVar[bool] = True

    classifier_dropout: float = 0.0
    num_labels: int = 3
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    decoder_start_token_id: int | None = 2

    @property
    def position_offset(self) -> int:
        return LEARNED_OFFSET


class BartForConditionalGeneration(AbsoluteEncoderDecoderLM[BartConfig]):
    """BART with LM head, whose matrix is the token embedding."""
