"""Checkpoints: Hugging Face folders, GGUF files, PEFT adapters, and Orbax checkpoints of runs.

`jaxllm.load` and `jaxllm.save_hf` are built on this package: `resolve` finds a checkpoint on disk
or on the Hub, `open_checkpoint` opens its files, and `load_model` builds the model.
"""

from jaxllm.checkpoint.hub import resolve, smollm2
from jaxllm.checkpoint.load import Checkpoint, load_model, open_checkpoint
from jaxllm.checkpoint.orbax import Restored, RunCheckpoints
from jaxllm.checkpoint.peft import load_adapter, save_adapter
from jaxllm.checkpoint.save import save_model
from jaxllm.checkpoint.source import WeightSource

__all__ = [
    "Checkpoint",
    "Restored",
    "RunCheckpoints",
    "WeightSource",
    "load_adapter",
    "load_model",
    "open_checkpoint",
    "resolve",
    "save_adapter",
    "save_model",
    "smollm2",
]
