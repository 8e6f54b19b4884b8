"""mBART (Liu et al. 2020, arXiv:2001.08210) and mBART-50: BART for translation.

Differs from BART in norms before each sublayer and at the end of each side, and in the start of the
decoder, which is the last token of the target: its language code, or the end token in mBART-50.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.cache.attention_view import document_starts
from jaxllm.common.errors import ConfigError
from jaxllm.models.absolute_encoder_decoder import AbsoluteEncoderDecoderLM
from jaxllm.models.bart import BartConfig
from jaxllm.models.input_checks import IGNORED


@dataclasses.dataclass(frozen=True, kw_only=True)
class MBartConfig(BartConfig):
    """mBART config, with the field names of config.json."""

    model_type = "mbart"
    pre_norm: ClassVar[bool] = True

    num_labels: int = 2
    decoder_start_token_id: int | None = None


class MBartForConditionalGeneration(AbsoluteEncoderDecoderLM[MBartConfig]):
    """mBART with LM head, whose matrix is the token embedding."""

    config_reads = ("pad_token_id",)

    def shift_right(
        self, labels: Int[Array, "B T"], segments: Int[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """Decoder inputs from labels: the last token of each text comes first, and is dropped at
        the end. -100 is replaced by pad, and neither is a token of a text.

        In packed rows it is so in every document.
        """
        pad = self.config.pad_token_id
        if pad is None:
            raise ConfigError(
                "pad_token_id: missing in config.json; labels cannot be shifted right"
            )
        labels = jnp.asarray(labels)
        ids = jnp.where(labels == IGNORED, pad, labels)
        starts = jnp.zeros(ids.shape, bool).at[:, 0].set(True)
        if segments is not None:
            starts = document_starts(jnp.asarray(segments))
        columns = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        # The last column of each column's document, and the last token up to there.
        ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        end = jax.lax.cummin(jnp.where(ends, columns, ids.shape[1]), axis=1, reverse=True)
        last = jax.lax.cummax(jnp.where(ids != pad, columns, 0), axis=1)
        last = jnp.take_along_axis(last, end, axis=1)
        first = jnp.take_along_axis(ids, last, axis=1)
        return jnp.where(starts, first, jnp.roll(ids, 1, axis=1))
