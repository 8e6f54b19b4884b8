"""Batch jobs over files: journal, report, and several processes."""

from jaxllm.batch.job.job import InputFile, Job

__all__ = ["InputFile", "Job"]
