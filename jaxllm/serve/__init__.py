"""Serving: requests that come as they come, in the slots of the batch engine.

`AsyncEngine` streams the tokens of each request. `jaxllm serve` puts an HTTP server before it.
"""

from jaxllm.serve.async_engine import (
    AsyncEngine,
    EngineStoppedError,
    GenerationStream,
    QueueFullError,
)
from jaxllm.serve.live_run import Chunk, TokenLogprob

__all__ = [
    "AsyncEngine",
    "Chunk",
    "EngineStoppedError",
    "GenerationStream",
    "QueueFullError",
    "TokenLogprob",
]
