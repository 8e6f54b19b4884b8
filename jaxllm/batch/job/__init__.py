"""Batch jobs over files: inputs, outputs, journal, report, and engines on Ray."""

from jaxllm.batch.job.job import Job
from jaxllm.batch.job.ray_actors import JaxLLMStage
from jaxllm.batch.tables import ColumnChoice, Source, read_source

__all__ = ["ColumnChoice", "JaxLLMStage", "Job", "Source", "read_source"]
