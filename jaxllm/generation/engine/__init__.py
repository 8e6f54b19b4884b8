"""The batch engine: many prompts through one model, in slots that are refilled."""

from jaxllm.generation.engine.generator import BatchGenerator
from jaxllm.generation.engine.rows import BatchOutput

__all__ = ["BatchGenerator", "BatchOutput"]
