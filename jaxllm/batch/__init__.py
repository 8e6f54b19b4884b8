"""Batches: many prompts through one model, in slots that are refilled.

`BatchGenerator` generates from rows (prompts with settings of their own). In float32, a row gets
the same output as from `jaxllm.generate` without other rows, up to rounding. A job
(`jaxllm.batch.job`) answers a file of rows and can be resumed. Slots step through the strategies of
`jaxllm.generation`; rows of strategies that slots do not hold run in batches of `jaxllm.generate`.
"""

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput
from jaxllm.batch.slot_pool import BatchCounts

__all__ = ["BatchCounts", "BatchGenerator", "BatchOutput", "Prediction"]
