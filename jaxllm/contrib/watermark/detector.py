"""Detects the green-list watermark in sequences, by the z-test of Kirchenbauer et al. 2023.

To detect SynthID, use the methods of ``SynthIDTextWatermarkLogitsProcessor`` that compute bits and
masks, with the scores in ``jaxllm.contrib.watermark.synthid``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError
from jaxllm.contrib.watermark.config import WatermarkingConfig
from jaxllm.contrib.watermark.green_list import WatermarkLogitsProcessor
from jaxllm.generation.inputs.values import bucket

_AT_ONCE = 32  # permutations of the vocabulary held in memory at a time
_SMALLEST_BUCKET = 32


@dataclass(frozen=True)
class WatermarkDetectorOutput:
    """Detection results, float64 ``[B]`` each (``prediction``: bool); p-values are one-sided."""

    num_tokens_scored: np.ndarray
    num_green_tokens: np.ndarray
    green_fraction: np.ndarray
    z_score: np.ndarray
    p_value: np.ndarray
    prediction: np.ndarray
    confidence: np.ndarray


class WatermarkDetector:
    """Detects whether sequences carry the watermark; transformers' class of this name.

    Args:
        model_config: the model's config: ``vocab_size``, and the decoder start or BOS token.
        watermarking_config: the settings that the sequences were generated with.
        ignore_repeated_ngrams: whether to count each n-gram once per sequence.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(vocab_size=50, bos_token_id=1)
    >>> detector = WatermarkDetector(config, WatermarkingConfig())
    >>> detector([[7, 8, 9, 10]])
    array([False])
    """

    def __init__(
        self,
        model_config: Any,
        watermarking_config: WatermarkingConfig | Mapping[str, Any],
        ignore_repeated_ngrams: bool = False,
    ) -> None:
        if isinstance(watermarking_config, Mapping):
            watermarking_config = WatermarkingConfig.from_dict(watermarking_config)
        start = getattr(model_config, "decoder_start_token_id", None)
        self.bos_token_id = model_config.bos_token_id if start is None else start
        self.greenlist_ratio = watermarking_config.greenlist_ratio
        self.ignore_repeated_ngrams = ignore_repeated_ngrams
        self.processor = watermarking_config.construct_processor(model_config.vocab_size)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        z_threshold: float = 3.0,
        return_dict: bool = False,
        *,
        attention_mask: Bool[Array, "B L"] | Int[Array, "B L"] | None = None,
    ) -> WatermarkDetectorOutput | np.ndarray:
        """Tests each row.

        Args:
            input_ids: sequences, preferably without prompts, which carry no watermark.
            z_threshold: z-score above which a sequence counts as watermarked.
            return_dict: whether to return all statistics instead of the predictions alone.
            attention_mask: padding mask; n-grams with a masked token do not count. None: all tokens
                count (as always in transformers).

        Raises:
            InputError: the rows are too short, or only some begin with BOS.
        """
        ids = np.asarray(input_ids)
        mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask)
        if ids.ndim != 2 or mask.shape != ids.shape or not ids.size:
            raise InputError(
                f"input_ids: expected [batch, length] and a mask alike, found {ids.shape} and "
                f"{mask.shape}"
            )
        begins_with_bos = ids[:, 0] == self.bos_token_id
        if begins_with_bos.any() != begins_with_bos.all():
            raise InputError("input_ids: some rows begin with BOS and some do not")
        if begins_with_bos.all():
            ids, mask = ids[:, 1:], mask[:, 1:]
        width = self.processor.context_width
        if ids.shape[1] <= width:
            raise InputError(
                f"input_ids: {ids.shape[1]} tokens without BOS, but the first that can be scored "
                f"has {width} before it"
            )
        scored, green = self._count(ids, mask.astype(bool))
        expected = self.greenlist_ratio
        with np.errstate(divide="ignore", invalid="ignore"):  # a row without a counted token: NaN
            fraction = green / scored
            z = (green - expected * scored) / np.sqrt(scored * expected * (1 - expected))
        prediction = z > z_threshold
        if not return_dict:
            return prediction
        p = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in z])
        return WatermarkDetectorOutput(scored, green, fraction, z, p, prediction, 1 - p)

    def _count(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number of n-grams that count in each row, and of those that end in a green token."""
        width = self.processor.context_width
        self_hash = self.processor.seeding_scheme == "selfhash"
        size = width if self_hash else width + 1
        windows = np.lib.stride_tricks.sliding_window_view(ids, size, axis=1)
        masks = np.lib.stride_tricks.sliding_window_view(mask, size, axis=1)
        unmasked = np.logical_and.reduce(masks, axis=-1)
        ngrams, numbers = np.unique(windows.reshape(-1, size), axis=0, return_inverse=True)
        numbers = numbers.reshape(unmasked.shape)
        padded = np.zeros((bucket(len(ngrams), _SMALLEST_BUCKET), size), np.int32)
        padded[: len(ngrams)] = ngrams
        contexts = padded if self_hash else padded[:, :-1]
        green = np.asarray(_green(self.processor, contexts, padded[:, -1]))
        scored = [row[real] for row, real in zip(numbers, unmasked, strict=True)]
        if self.ignore_repeated_ngrams:
            scored = [np.unique(row) for row in scored]
        return (
            np.array([float(len(row)) for row in scored]),
            np.array([float(green[row].sum()) for row in scored]),
        )


@jax.jit
def _green(
    processor: WatermarkLogitsProcessor, contexts: Int[Array, "N w"], tokens: Int[Array, " N"]
) -> Bool[Array, " N"]:
    return jax.lax.map(
        lambda pair: processor.is_green(*pair), (contexts, tokens), batch_size=_AT_ONCE
    )
