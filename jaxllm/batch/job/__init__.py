"""Batch jobs over files: inputs, outputs, journal, report, and several processes."""

from jaxllm.batch.job.inputs import ColumnChoice, Source, read_source
from jaxllm.batch.job.job import Job

__all__ = ["ColumnChoice", "Job", "Source", "read_source"]
