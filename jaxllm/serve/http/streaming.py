"""Answers that end with their client: server-sent events, and work that a disconnect cancels."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.common.errors import JaxLLMError
from jaxllm.serve.http.api_types import ApiError, api_error, stopped_error

T = TypeVar("T")

END_SECONDS = 1.0
"""Time in which the last events of a stream must be sent when the server ends."""
CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics where the client went away (nginx's)."""


class ClientGoneError(Exception):
    """The client closed its connection before the answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client disconnects.

    Args:
        receive: of a request whose body has been read.

    Raises:
        ClientGoneError: it did.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events of an interface like OpenAI's, which end with ``[DONE]``.

    An error after the first event is an event of its own.

    Args:
        events: JSON objects.
        seconds: limit of the time until the last byte is sent.
        on_end: called at the end with the status, and with the error if the stream ended with one.
    """

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        seconds: float,
        on_end: Callable[[int, ApiError | None], object],
        headers: dict[str, str],
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._seconds, self._on_end = events, seconds, on_end
        self._has_ended = False
        self._failure: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        status = 500
        try:
            async with asyncio.timeout(self._seconds):
                await send(start)
                status = await until_disconnect(receive, self._send_all(send))
        except (ClientGoneError, OSError):  # TimeoutError is an OSError
            status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # the server's time for draining is over
            status = 503
            with contextlib.suppress(TimeoutError):  # from a client that reads nothing
                async with asyncio.timeout(END_SECONDS):
                    status = await self._send_end(send, stopped_error())
        finally:
            self._on_end(status, self._failure)

    async def _send_all(self, send: Send) -> int:
        try:
            async for event in self._events:
                await _write(send, json.dumps(event, ensure_ascii=False))
        except JaxLLMError as error:
            return await self._send_end(send, api_error(error))
        return await self._send_end(send)

    async def _send_end(self, send: Send, failure: ApiError | None = None) -> int:
        """Sends the last events, once; returns the status for the log."""
        if self._has_ended:
            return 200
        self._has_ended, self._failure = True, failure
        if failure is not None:
            await _write(send, json.dumps(failure.to_json()))
        await _write(send, "[DONE]", more=False)
        return 200 if failure is None else failure.status


async def _write(send: Send, data: str, *, more: bool = True) -> None:
    """Sends an event."""
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def read_limited(receive: Receive, max_bytes: int, seconds: float) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is larger than `max_bytes`, or takes longer than `seconds`.
        ClientGoneError: the client disconnects.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise ApiError(413, f"body: larger than {max_bytes} bytes", param="body")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        message = f"body: did not arrive within {seconds:g} seconds"
        raise ApiError(408, message, param="body") from None
