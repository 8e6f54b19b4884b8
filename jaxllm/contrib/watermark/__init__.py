"""Watermarks in sampled tokens: green lists and SynthID, with transformers' names and numbers.

The field `watermarking_config` of a generation config enables one of them.
"""

from jaxllm.contrib.watermark.config import (
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    watermarking_config,
)
from jaxllm.contrib.watermark.detector import WatermarkDetector
from jaxllm.contrib.watermark.green_list import WatermarkLogitsProcessor
from jaxllm.contrib.watermark.synthid import SynthIDTextWatermarkLogitsProcessor
from jaxllm.generation.registration import register_processor

__all__ = [
    "SynthIDTextWatermarkLogitsProcessor",
    "SynthIDTextWatermarkingConfig",
    "WatermarkDetector",
    "WatermarkLogitsProcessor",
    "WatermarkingConfig",
]

register_processor(
    "watermarking_config",
    lambda value, inputs: watermarking_config(value).construct_processor(inputs.vocab_size),
    place="last",
)
