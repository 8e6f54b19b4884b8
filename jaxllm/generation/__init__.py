"""Text generation: settings, logits processors, token choice, and the decoding loop."""

from jaxllm.generation import processors, stopping
from jaxllm.generation.call.output import GenerateOutput
from jaxllm.generation.generate import generate, stream
from jaxllm.generation.processors import *  # noqa: F403
from jaxllm.generation.processors.watermark.detector import WatermarkDetector
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.stopping import *  # noqa: F403
from jaxllm.generation.strategies.beam.constraints import DisjunctiveConstraint, PhrasalConstraint

__all__ = [
    "DisjunctiveConstraint",
    "GenerateOutput",
    "GenerationConfig",
    "PhrasalConstraint",
    "WatermarkDetector",
    "generate",
    "stream",
]
__all__ += processors.__all__
__all__ += stopping.__all__
