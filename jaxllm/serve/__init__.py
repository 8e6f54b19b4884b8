"""Serving: requests that come as they come, in the slots of the batch engine.

`AsyncEngine` streams the tokens of each request. `jaxllm serve` puts an HTTP server before it.
"""

from jaxllm.batch.rows import Chunk, TokenLogprob
from jaxllm.serve.async_engine import (
    AsyncEngine,
    EngineStoppedError,
    GenerationStream,
    QueueFullError,
)

__all__ = [
    "AsyncEngine",
    "Chunk",
    "EngineStoppedError",
    "GenerationStream",
    "QueueFullError",
    "TokenLogprob",
]
