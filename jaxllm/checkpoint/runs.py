"""The earlier import path of `jaxllm.checkpoint.orbax`, kept for code written against it."""

from jaxllm.checkpoint.orbax import Restored, RunCheckpoints
from jaxllm.common.files import RunLock

__all__ = ["Restored", "RunCheckpoints", "RunLock"]
