"""Checkpoints of training runs: atomic steps, a digest of every array, one writer per folder."""

from jaxllm.checkpoint.orbax.run_checkpoints import Restored, RunCheckpoints
from jaxllm.common.files import RunLock

__all__ = ["Restored", "RunCheckpoints", "RunLock"]
