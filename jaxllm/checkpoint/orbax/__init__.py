"""Checkpoints of training runs: atomic steps, a digest of every array, one writer per folder."""

from jaxllm.checkpoint.orbax.run_checkpoints import Restored, RunCheckpoints

__all__ = ["Restored", "RunCheckpoints"]
