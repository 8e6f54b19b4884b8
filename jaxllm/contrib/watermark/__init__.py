"""Watermarks in sampled tokens: green lists and SynthID, with transformers' names and numbers.

The field `watermarking_config` of a generation config enables one of them.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.common.errors import InputError
from jaxllm.contrib.watermark.green_list import (
    WatermarkDetector,
    WatermarkingConfig,
    WatermarkLogitsProcessor,
)
from jaxllm.contrib.watermark.synthid import (
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
)
from jaxllm.generation.registration import register_processor

__all__ = [
    "SynthIDTextWatermarkLogitsProcessor",
    "SynthIDTextWatermarkingConfig",
    "WatermarkDetector",
    "WatermarkLogitsProcessor",
    "WatermarkingConfig",
]


def watermarking_config(
    value: Mapping[str, Any] | WatermarkingConfig | SynthIDTextWatermarkingConfig,
) -> WatermarkingConfig | SynthIDTextWatermarkingConfig:
    """Converts the field ``watermarking_config`` of a generation config to one of the two classes.

    A mapping with ``ngram_len`` or ``keys`` is SynthID's (transformers itself does not read these
    from a file).
    """
    if isinstance(value, WatermarkingConfig | SynthIDTextWatermarkingConfig):
        return value
    if not isinstance(value, Mapping):
        raise InputError(
            "watermarking_config: expected a WatermarkingConfig, a SynthIDTextWatermarkingConfig "
            f"or a mapping with their settings, found {value!r}"
        )
    synthid = "ngram_len" in value or "keys" in value
    return (SynthIDTextWatermarkingConfig if synthid else WatermarkingConfig).from_dict(value)


register_processor(
    "watermarking_config",
    lambda value, inputs: watermarking_config(value).construct_processor(inputs.vocab_size),
    place="last",
)
