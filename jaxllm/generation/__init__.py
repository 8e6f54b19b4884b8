"""Text generation: settings, logits processors, token choice, and the decoding loop."""

from jaxllm.generation import processors, stopping
from jaxllm.generation.config import GenerationConfig
from jaxllm.generation.constraints import DisjunctiveConstraint, PhrasalConstraint
from jaxllm.generation.generate import generate, stream
from jaxllm.generation.output import GenerateOutput
from jaxllm.generation.processors import *  # noqa: F403
from jaxllm.generation.stopping import *  # noqa: F403
from jaxllm.generation.watermark_detector import WatermarkDetector

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
