"""M2M100 (Fan et al. 2020, arXiv:2010.11125) and the dense models of NLLB (arXiv:2207.04672).

An encoder-decoder with sinusoidal positions, and norms before each sublayer and at the end of each
side.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxllm.models.absolute_encoder_decoder import AbsoluteConfig, AbsoluteEncoderDecoderLM
from jaxllm.nn.positions import Sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class M2M100Config(AbsoluteConfig):
    """M2M100 config, with the field names of config.json."""

    model_type = "m2m_100"
    unread = (*AbsoluteConfig.unread, "max_position_embeddings")
    pre_norm: ClassVar[bool] = True

    vocab_size: int = 128112
    encoder_layerdrop: float = 0.05
    decoder_layerdrop: float = 0.05
    activation_function: str = "relu"
    attention_dropout: float = 0.1
    scale_embedding: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    decoder_start_token_id: int | None = 2

    @property
    def sinusoids(self) -> Sinusoids:
        return Sinusoids(self.d_model, steps=self.d_model // 2 - 1, zero_row=self.pad_token_id)

    @property
    def position_offset(self) -> int:
        """The first token's position is the one after the pad token's id, as in fairseq."""
        return 1 + (self.pad_token_id or 0)

    @property
    def max_positions(self) -> int | None:
        return None  # a longer text has further positions

    @property
    def longest_prompt(self) -> None:
        return None


class M2M100ForConditionalGeneration(AbsoluteEncoderDecoderLM[M2M100Config]):
    """M2M100 or NLLB with LM head, whose matrix is the token embedding."""

    has_logits_bias = False
