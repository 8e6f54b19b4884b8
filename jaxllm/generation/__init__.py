"""Text generation: settings, logits processors, token choice, and the decoding loop."""

from jaxllm.generation import processors
from jaxllm.generation.config import GenerationConfig
from jaxllm.generation.generate import GenerateOutput, generate, stream
from jaxllm.generation.processors import *  # noqa: F403

__all__ = ["GenerateOutput", "GenerationConfig", "generate", "stream"]
__all__ += processors.__all__
