"""Checkpoints of a training run: atomic steps with a digest of every array, one writer a folder."""

from jaxllm.checkpoint.runs.checkpoints import Restored, RunCheckpoints
from jaxllm.checkpoint.runs.lock import RunLock

__all__ = ["Restored", "RunCheckpoints", "RunLock"]
