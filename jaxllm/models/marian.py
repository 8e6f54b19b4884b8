"""Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344): the translation models of OPUS-MT.

An encoder-decoder with sinusoidal positions, and norms after each sublayer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.models.absolute_encoder_decoder import (
    AbsoluteConfig,
    AbsoluteEncoderDecoderLM,
    absolute_table,
)
from jaxllm.models.weights import Table, same
from jaxllm.nn.positions import Sinusoids


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarianConfig(AbsoluteConfig):
    """Marian config, with the field names of config.json.

    With `share_encoder_decoder_embeddings` false the decoder has a token embedding of its own, and
    with `tie_word_embeddings` false the head has a matrix of its own too. Both sides have the same
    number of tokens: `decoder_vocab_size` is read, and must be `vocab_size`.
    """

    model_type = "marian"
    scales_decoder_embeds: ClassVar[bool] = True
    flax_constants: ClassVar[Mapping[str, Any]] = {"share_encoder_decoder_embeddings": True}

    vocab_size: int = 58101
    share_encoder_decoder_embeddings: bool = True
    pad_token_id: int | None = 58100
    eos_token_id: int | tuple[int, ...] | None = 0
    decoder_start_token_id: int | None = 58100

    @property
    def sinusoids(self) -> Sinusoids:
        return Sinusoids(self.d_model, steps=self.d_model // 2)

    @property
    def separate_embeddings(self) -> bool:
        return not self.share_encoder_decoder_embeddings

    @classmethod
    def handled_keys(cls, raw: Mapping[str, Any]) -> frozenset[str]:
        size, target = raw.get("vocab_size", cls.vocab_size), raw.get("decoder_vocab_size")
        if target not in (None, size):
            raise UnsupportedError(
                f"decoder_vocab_size: {quoted(target)} differs from vocab_size, {quoted(size)}; "
                "encoder and decoder with different vocabularies are not implemented"
            )
        return super().handled_keys(raw) | {"decoder_vocab_size"}

    def check_tying(self) -> None:
        if self.share_encoder_decoder_embeddings and not self.tie_word_embeddings:
            raise ConfigError(
                "tie_word_embeddings: false needs share_encoder_decoder_embeddings false, which is "
                "true"
            )

    def to_json(self, model_type: str, architecture: str) -> dict[str, Any]:
        raw = super().to_json(model_type, architecture)
        return raw | {"decoder_vocab_size": self.vocab_size}


class MarianMTModel(AbsoluteEncoderDecoderLM[MarianConfig]):
    """Marian with LM head."""


def marian_table(config: MarianConfig) -> Table:
    """Weight table of Marian."""
    table = absolute_table(config)
    if not config.separate_embeddings:
        return table
    decoder = "decoder_input.embed.weight"
    table = table.with_entries(
        *same("shared.weight", "model.encoder.embed_tokens.weight"),
        *same(decoder, "model.decoder.embed_tokens.weight"),
        *same("lm_head.weight", "lm_head.weight"),
    )
    return dataclasses.replace(table, copies=((r"lm_head\.weight", decoder),))
