"""Training data: reads rows of files, encodes and batches them; the position can be restored."""

from jaxllm.training.data.batches import Batches, Epoch, EpochBatches, Source
from jaxllm.training.data.config import DataConfig, ModelInfo
from jaxllm.training.data.examples import Counts, Examples
from jaxllm.training.data.pipeline import (
    add_reference,
    epoch_batches,
    make_batches,
    read_examples,
    reference_logps,
    rows_of,
)
from jaxllm.training.data.stream import Peers

__all__ = [
    "Batches",
    "Counts",
    "DataConfig",
    "Epoch",
    "EpochBatches",
    "Examples",
    "ModelInfo",
    "Peers",
    "Source",
    "add_reference",
    "epoch_batches",
    "make_batches",
    "read_examples",
    "reference_logps",
    "rows_of",
]
