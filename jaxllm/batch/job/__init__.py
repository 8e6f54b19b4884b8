"""Batch jobs over files: inputs, outputs, journal, report, and engines on Ray."""

from jaxllm.batch.job.inputs import ColumnChoice, Source, read_source
from jaxllm.batch.job.job import Job
from jaxllm.batch.job.ray_stage import JaxLLMStage

__all__ = ["ColumnChoice", "JaxLLMStage", "Job", "Source", "read_source"]
