"""Inputs of a job: JSONL, OpenAI batch files, CSV, Parquet and data sets, each as a `Source`."""

from jaxllm.batch.tables.columns import ColumnChoice
from jaxllm.batch.tables.read import read_source
from jaxllm.batch.tables.source import Source

__all__ = ["ColumnChoice", "Source", "read_source"]
