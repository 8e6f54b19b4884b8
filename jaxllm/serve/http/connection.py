"""HTTP/1.1 connections: uvicorn's protocol, with time limits for what a client must send.

uvicorn calls the application when the headers of a request have arrived, and has no limit for the
time before that. It also waits without a limit for the rest of a body whose request it has already
answered, and for a client that does not read the rest of its answer.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from typing import Any, cast

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.serve.http.api_errors import RETRY_SECONDS, ApiError

# Windows has neither.
fcntl, termios = (
    importlib.import_module(name) if importlib.util.find_spec(name) else None
    for name in ("fcntl", "termios")
)

STOPPING_SECONDS = 5.0
"""Time in which a client must read something of the rest of its answer when the server stops."""


class Connection(H11Protocol):
    """A connection that closes when its client takes too long.

    The headers of a request must arrive within `client_seconds` of the connection, or of their own
    first byte if the connection has had a request before. Between two requests uvicorn's limit for
    idle connections counts. The application limits the time of the body. If it answers before the
    body is complete, the rest of the body must arrive within `client_seconds` too. A client that
    leaves so much of an answer unread that writing has to wait must read something in this time.

    Args:
        client_seconds: the limit.
        options: arguments of `H11Protocol`.
    """

    def __init__(self, *, client_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._client_seconds = client_seconds
        self._application: Any = self.app
        self.app = cast(Any, self._answer)
        self._awaited: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._is_stopping = False

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived as a whole, and its answer is not complete."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    # What uvicorn calls.

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_reading_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self.transport.is_closing():
            self._watch_reading(self._client_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._cancel_reading_timer()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """Closes the connection when the request that has arrived, if any, is answered.

        A request whose body is incomplete is refused, since it may never be complete.
        """
        self._is_stopping = True
        if self._reading_timer is not None:
            self._watch_reading(self._client_seconds)
        if self.cycle is None or self.cycle.response_complete:
            self._close()
            return
        self.cycle.keep_alive = False
        if self.cycle.more_body:
            self.cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP; the application sees its client disconnect."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1"))

    def _should_upgrade(self) -> bool:
        return False  # without uvicorn's warning for each request; there are no WebSockets here

    # The application.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application, and closes the connection if it ends without a whole answer."""
        cycle = self.cycle

        async def receive_unless_stopping() -> Message:
            message = await receive()
            if self._is_stopping and message.get("more_body", False):
                raise ApiError(
                    503,
                    "the server is stopping, and the body of the request has not arrived",
                    code="server_stopping",
                    retry_after=RETRY_SECONDS,
                )
            return message

        try:
            await self._application(scope, receive_unless_stopping, send)
        except asyncio.CancelledError:  # the time for draining is over
            cycle.disconnected = True
            self.transport.abort()
        if not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True
            self._close()

    # Time limits.

    def _watch(self) -> None:
        """Starts the timer of what is awaited now, unless the same thing was awaited before."""
        awaited = self._what_is_awaited()
        if awaited == self._awaited:
            return
        self._awaited = awaited
        self._cancel_timer()
        if awaited == "reading":
            self._watch_reading(self._client_seconds)
        elif awaited is not None:
            self._timer = self.loop.call_later(self._client_seconds, self._give_up)

    def _what_is_awaited(self) -> str | None:
        if self.transport.is_closing():
            return "reading"
        if self.cycle is not None and not self.cycle.response_complete:
            return None  # the application has limits of its own
        if self.conn.their_state is h11.SEND_BODY:
            return "body"
        if self.timeout_keep_alive_task is not None:
            return None
        return "headers"

    def _give_up(self) -> None:
        has_begun = bool(self.conn.trailing_data[0])
        if self._awaited == "headers" and has_begun:
            seconds = self._client_seconds
            self._refuse(ApiError(408, f"headers: did not arrive within {seconds:g} seconds"))
        else:
            self._close()

    def _watch_reading(self, seconds: float) -> None:
        """Closes the connection if the client has read nothing in so many seconds."""
        self._cancel_reading_timer()
        if self._is_stopping:
            seconds = min(seconds, STOPPING_SECONDS)
        unread = self._unread_bytes()
        self._reading_timer = self.loop.call_later(seconds, self._check_reading, seconds, unread)

    def _check_reading(self, seconds: float, unread: int) -> None:
        if self._unread_bytes() < unread:
            self._watch_reading(seconds)
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Bytes of the answer that wait in this process, and in the kernel's buffer where it says
        how many: a slow reader may take long to empty so much of it that this process can go on."""
        waiting = self.transport.get_write_buffer_size()
        if fcntl is None or termios is None:
            return waiting
        try:
            socket = self.transport.get_extra_info("socket")
            size = fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # the socket is closed
            return waiting
        return waiting + int.from_bytes(size, sys.byteorder)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    # Ends.

    def _refuse(self, error: ApiError) -> None:
        """Closes the connection with an error, if an answer can be sent."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.to_json()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=error.status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch()
