"""Checkpoints of a training run: atomic steps with a digest of every array, one writer a folder."""

from jaxllm.checkpoint.orbax.run_checkpoints import Restored, RunCheckpoints
from jaxllm.common.run_lock import RunLock

__all__ = ["Restored", "RunCheckpoints", "RunLock"]
