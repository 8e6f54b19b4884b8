"""Runs the HTTP server: opens the port, loads, limits its clients' time, and drains at the end.

uvicorn calls the application when the headers of a request have arrived, and has no limit for the
time before that. It also waits without a limit for the rest of a body whose request it has already
answered, and for a client that does not read the rest of its answer. `Connection` has these limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib
import importlib.util
import json
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Generator
from typing import Any, cast

import h11
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxllm.common.errors import InputError
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.serve.http.api_types import RETRY_SECONDS, ApiError
from jaxllm.serve.http.app import log_request, make_app
from jaxllm.serve.http.state import ServerSettings, ServerState, Startup

# Windows has neither.
fcntl, termios = (
    importlib.import_module(name) if importlib.util.find_spec(name) else None
    for name in ("fcntl", "termios")
)

BACKLOG = 2048
STOPPING_SECONDS = 5.0
"""Time in which a client must read something of the rest of its answer when the server stops."""
_LOG = logging.getLogger("jaxllm.serve")


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
        self._timers: dict[str, asyncio.TimerHandle] = {}
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
        for name in [*self._timers]:
            self._cancel(name)
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
            self._cancel("reading")

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """Closes the connection when the request that has arrived, if any, is answered.

        A request whose body is incomplete is refused, since it may never be complete.
        """
        self._is_stopping = True
        if "reading" in self._timers:
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
        self._cancel("request")
        if awaited == "reading":
            self._watch_reading(self._client_seconds)
        elif awaited is not None:
            self._timers["request"] = self.loop.call_later(self._client_seconds, self._give_up)

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
        self._cancel("reading")
        if self._is_stopping:
            seconds = min(seconds, STOPPING_SECONDS)
        unread = self._unread_bytes()
        timer = self.loop.call_later(seconds, self._check_reading, seconds, unread)
        self._timers["reading"] = timer

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

    def _cancel(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    # Ends.

    def _refuse(self, error: ApiError) -> None:
        """Closes the connection with an error, if an answer can be sent, and logs it."""
        log_request(error.status, error, self.client)
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


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, since commands have their own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class _ExceptionHandler:
    """An event loop's exception handler that logs a lack of file descriptors as a warning.

    asyncio cannot accept connections then. It tries again after a second, but would log a traceback
    for each that waits.
    """

    def __init__(self) -> None:
        self._last_warning = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self._last_warning > 1:
            self._last_warning = loop.time()
            _LOG.warning("no connections are accepted: too many are open (raise ulimit -n)")


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket on an address; it refuses connections until the server listens.

    Raises:
        InputError: the address is in use or is not this machine's.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as failure:
        raise InputError(
            f"{host}:{port}: cannot be bound ({failure.strerror or failure})"
        ) from None
    return bound


def listen(bound: socket.socket) -> None:
    """Opens the port of a bound socket.

    Raises:
        InputError: another process has opened it; two can bind a port that none listens on.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as failure:
        host, port = bound.getsockname()[:2]
        raise InputError(
            f"{host}:{port}: cannot be opened ({failure.strerror}); another process took it"
        ) from None


class HttpServer:
    """A server on a bound socket.

    Args:
        load: loads the model, in a thread of its own, and tells the `Startup` when it begins to
            compile.
        drain_seconds: time that requests have to end after `stop`.

    Attributes:
        startup: what is known of the server's start.
    """

    def __init__(
        self,
        settings: ServerSettings,
        bound: socket.socket,
        load: Callable[[Startup], ServerState],
        *,
        drain_seconds: float = 60.0,
    ) -> None:
        self.startup, self._socket, self._load = Startup(settings), bound, load
        seconds = settings.limits.client_seconds
        connection = functools.partial(Connection, client_seconds=seconds)
        config = uvicorn.Config(
            make_app(self.startup),
            http=cast(type[Connection], connection),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=round(drain_seconds),
        )
        self._server = _Server(config)

    @property
    def running_requests(self) -> int:
        """Number of requests that have arrived and are not answered; from any thread."""
        connections = list(self._server.server_state.connections)
        return sum(isinstance(each, Connection) and each.is_answering for each in connections)

    def stop(self) -> None:
        """Takes no more connections, and ends when all requests have; from any thread."""
        self._server.should_exit = True

    async def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Opens the port, loads the model, compiles its programs, and serves until `stop`.

        Args:
            on_ready: called before the first request runs.

        Raises:
            InputError: another process listens on the port meanwhile.
            Exception: what `load` or the start of the engine raises.
        """
        listen(self._socket)
        asyncio.get_running_loop().set_exception_handler(_ExceptionHandler())
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        load, state = with_settings_of_this_thread(self._load), None
        try:
            state = await asyncio.to_thread(load, self.startup)
            await state.engine.start()
            on_ready()
            self.startup.end(state)
        except BaseException:
            self.startup.end(None)
            self.stop()
            raise
        finally:
            try:
                await serving
            finally:
                if state is not None:
                    await state.engine.close(drain=False)
                    if state.texts is not None:
                        state.texts.close()


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time, level, message and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


@contextlib.contextmanager
def logs_to_stderr() -> Generator[None]:
    """Sends the logs of the server, and the warnings of uvicorn, to stderr inside."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    levels = {"jaxllm.serve": logging.INFO, "uvicorn": logging.WARNING}
    loggers = [logging.getLogger(name) for name in levels]
    earlier = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(levels[logger.name])
    try:
        yield
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, earlier, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
