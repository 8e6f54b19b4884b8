"""The batch engine: many prompts through one model, in slots that are refilled."""

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.rows import BatchOutput

__all__ = ["BatchGenerator", "BatchOutput"]
