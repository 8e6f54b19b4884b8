"""Runs the HTTP server: compiles, opens the port, and drains when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import socket
import time
from collections.abc import Callable, Generator
from typing import Any, cast

import uvicorn

from jaxllm.common.errors import InputError
from jaxllm.serve.http.app import make_app
from jaxllm.serve.http.connection import Connection
from jaxllm.serve.http.state import ServerState

BACKLOG = 2048
_LOG = logging.getLogger("jaxllm.serve")


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
            f"{host}:{port}: cannot be opened ({failure.strerror}); another process took it "
            "while this one compiled"
        ) from None


class HttpServer:
    """A server on a bound socket.

    Args:
        drain_seconds: time that requests have to end after `stop`.
    """

    def __init__(
        self,
        state: ServerState,
        bound: socket.socket,
        *,
        drain_seconds: float = 60.0,
    ) -> None:
        self._state, self._socket = state, bound
        connection = functools.partial(Connection, client_seconds=state.limits.client_seconds)
        config = uvicorn.Config(
            make_app(state),
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
        self.warm_up_seconds = 0.0
        """Time that compiling took."""

    @property
    def running_requests(self) -> int:
        """Number of requests that have arrived and are not answered; from any thread."""
        connections = list(self._server.server_state.connections)
        return sum(isinstance(each, Connection) and each.is_answering for each in connections)

    def stop(self) -> None:
        """Takes no more connections, and ends when all requests have; from any thread."""
        self._server.should_exit = True

    async def run(self, on_ready: Callable[[], object] = lambda: None) -> None:
        """Compiles all programs, opens the port, and serves until `stop`.

        Args:
            on_ready: called when the port is open.

        Raises:
            InputError: another process listens on the port meanwhile.
        """
        engine, embedder = self._state.engine, self._state.embedder
        start = time.perf_counter()
        await engine.start()
        try:
            if embedder is not None:
                await asyncio.to_thread(embedder.warm_up)
            self.warm_up_seconds = time.perf_counter() - start
            listen(self._socket)
            asyncio.get_running_loop().set_exception_handler(_ExceptionHandler())
            on_ready()
            await self._server.serve(sockets=[self._socket])
        finally:
            await engine.close(drain=False)
            if self._state.texts is not None:
                self._state.texts.close()
