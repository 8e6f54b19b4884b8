"""Inputs of a job: JSONL, OpenAI batch files, CSV, Parquet and data sets, each as a `Source`."""

from jaxllm.batch.job.inputs.columns import ColumnChoice
from jaxllm.batch.job.inputs.read import read_source
from jaxllm.batch.job.inputs.source import Source

__all__ = ["ColumnChoice", "Source", "read_source"]
