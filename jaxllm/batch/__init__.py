"""Batch engine: generates from many prompts with continuous batching in a fixed set of slots."""

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.rows import BatchOutput

__all__ = ["BatchGenerator", "BatchOutput"]
