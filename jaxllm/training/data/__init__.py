"""Training data: reads rows of files, encodes and batches them; the position can be restored."""

from jaxllm.training.data.batches import Batches, Epoch
from jaxllm.training.data.config import DataConfig, ModelInfo
from jaxllm.training.data.examples import Counts, Examples
from jaxllm.training.data.pipeline import epoch_batches, make_batches, read_examples, rows_of

__all__ = [
    "Batches",
    "Counts",
    "DataConfig",
    "Epoch",
    "Examples",
    "ModelInfo",
    "epoch_batches",
    "make_batches",
    "read_examples",
    "rows_of",
]
