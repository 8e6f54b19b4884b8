"""The chunks of one request, from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from jaxllm.serve.chunks import Chunk
from jaxllm.serve.engine_thread import EngineThread
from jaxllm.serve.live_rows import LiveRow


class GenerationStream:
    """The chunks of one request, as they come: an asynchronous iterator.

    Used as a context manager, it cancels the request when the block ends early.
    """

    def __init__(self, thread: EngineThread, row: LiveRow) -> None:
        self._thread, self.row = thread, row
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._open_samples = set(range(row.samples))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.row.input_ids)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk of any sample.

        Raises:
            JaxLLMError: the request ended with an error.
        """
        while self._open_samples:
            chunk = await self._chunks.get()
            if chunk.sample not in self._open_samples:  # cancelled
                continue
            if chunk.is_last:
                self._open_samples.remove(chunk.sample)
            if chunk.error is not None:
                self.cancel()
                raise chunk.error
            return chunk
        raise StopAsyncIteration

    def cancel(self, sample: int | None = None) -> None:
        """Ends the request, or one of its samples; slots are free after the step that runs."""
        samples = self._open_samples if sample is None else self._open_samples & {sample}
        for number in samples:
            self._thread.cancel(self, number)
        self._open_samples -= samples

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def deliver(self, chunks: list[Chunk]) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody reads
            self._loop.call_soon_threadsafe(self._put, chunks)

    def _put(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)
