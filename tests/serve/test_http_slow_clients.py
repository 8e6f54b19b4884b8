"""The server with clients that send or read slowly or never, and what they do to its end."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
import uvicorn
from serving_tools import (
    RunningServer,
    connected,
    eventually,
    no_tracebacks,
    running_server,
    slowed,
)

from jaxllm.serve.http.server import Connection
from jaxllm.serve.http.state import Limits

SECONDS = 0.4
"""The time that clients have."""
IDLE_SECONDS = 25
"""Less than the limits of idle connections and for draining, so that neither ends a test."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
LONG = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits = Limits(client_seconds=SECONDS)
    options: Any = {"api_keys": (b"key",), "embeddings": False, "warm_up": False}
    with running_server(limits=limits, **options) as server:
        yield server


def rest(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(10_000):
            parts.append(part)
    return b"".join(parts)


def status(connection: socket.socket) -> int:
    """Reads one answer; returns its status."""
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


@contextlib.contextmanager
def dripping(connection: socket.socket) -> Iterator[None]:
    """Sends a byte every now and then, until the connection is closed."""
    has_ended = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not has_ended.wait(SECONDS / 4):
                connection.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@pytest.mark.parametrize("begun", [b"", HEAD, b"GET /health HTTP/1.1\r\nHost: "])
@pytest.mark.parametrize("drips", [False, True])
def test_headers_have_a_time_limit(server, begun, drips):
    with connected(server) as connection, contextlib.ExitStack() as stack:
        start = time.monotonic()
        connection.sendall(begun)
        if drips:
            stack.enter_context(dripping(connection))
        answer = rest(connection)
        assert SECONDS * 0.9 < time.monotonic() - start < IDLE_SECONDS
    if not begun and not drips:
        assert answer == b""
    else:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"] == (
            "headers: did not arrive within 0.4 seconds"
        )


def test_headers_of_a_second_request_have_the_limit_too_and_idle_connections_do_not(server):
    with connected(server) as connection:
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        for _ in range(2):
            connection.sendall(request)
            assert status(connection) == 200
            time.sleep(SECONDS * 2)  # less than the 30 seconds of idle connections
        connection.sendall(request[:20])
        start = time.monotonic()
        assert rest(connection).startswith(b"HTTP/1.1 408 ")
        assert SECONDS * 0.9 < time.monotonic() - start < IDLE_SECONDS


@pytest.mark.parametrize("size", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
def test_a_body_that_drips_ends_with_its_connection(server, size):
    with connected(server) as connection:
        start = time.monotonic()
        head = HEAD + b"Authorization: Bearer key\r\n" + size + b"\r\n\r\n"
        connection.sendall(head + (b"3e8\r\n" if b"chunked" in size else b""))
        with dripping(connection):
            answer = rest(connection)
        assert SECONDS * 0.9 < time.monotonic() - start < IDLE_SECONDS
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert b"body: did not arrive within 0.4 seconds" in answer


@pytest.mark.parametrize("drips", [False, True])
def test_the_rest_of_a_body_that_is_not_read_has_the_limit(server, drips):
    with connected(server) as connection, contextlib.ExitStack() as stack:
        start = time.monotonic()
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")  # without a key
        assert status(connection) == 401
        if drips:
            stack.enter_context(dripping(connection))
        assert rest(connection) == b""
        assert SECONDS * 0.9 < time.monotonic() - start < IDLE_SECONDS
    # A body that comes in time leaves the connection open.
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(HEAD + b"Content-Length: 3\r\n\r\n{")
            assert status(connection) == 401
            connection.sendall(b"  ")


@contextlib.contextmanager
def sending(size: int) -> Iterator[tuple[set[Any], Callable[[], socket.socket]]]:
    """A server whose answers have so many bytes: its connections, and a function that connects."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size})

    connection: Any = functools.partial(Connection, client_seconds=SECONDS)
    config = uvicorn.Config(app, http=connection, ws="none", lifespan="off", log_config=None)
    server, bound = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    address = bound.getsockname()
    thread = threading.Thread(target=lambda: server.run([bound]))
    thread.start()
    try:
        connections = server.server_state.connections
        yield connections, lambda: socket.create_connection(address, timeout=60)
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.ci
@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_a_client_that_reads_nothing_loses_its_connection(close):
    request = b"GET / HTTP/1.1\r\nHost: x\r\n" + close + b"\r\n"
    size = 2**24  # more than the system's buffers hold
    with sending(size) as (connections, connect):
        with connect() as silent:
            silent.sendall(request * 2)
            eventually(lambda: len(connections) == 1)
            eventually(lambda: not connections)
        with connect() as slow:  # this one reads on, for a longer time than the limit
            slow.sendall(request)
            received = 0
            while received < size:
                # At first so little that the server's own buffer does not shrink for a long time.
                part = slow.recv(2**13 if received < 2**20 else 2**20)
                assert part, received
                received += len(part)
                time.sleep(SECONDS / 32)


def unfinished(server: RunningServer) -> list[socket.socket]:
    """Connections whose requests are not complete."""
    begun = [b"", HEAD, HEAD + b"Content-Length: 10\r\n\r\n{"]
    begun.append(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{")
    connections = [connected(server) for _ in begun]
    for connection, part in zip(connections, begun, strict=True):
        connection.sendall(part)
    eventually(lambda: len(server.server._server.server_state.connections) >= len(begun))
    time.sleep(0.2)  # until what was sent has been read
    return connections


def test_requests_that_are_not_complete_do_not_delay_the_end(caplog):
    with running_server(embeddings=False) as server, no_tracebacks(caplog), slowed(server, 0.1):
        connections = unfinished(server)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert server.server.running_requests == 1
            server.server.stop()
            start = time.monotonic()
            assert [rest(c)[:13] for c in connections] == [b"", b"", *[b"HTTP/1.1 503 "] * 2]
            assert time.monotonic() - start < IDLE_SECONDS
            events = [line for line in lines if line]  # the stream goes on to its end
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        server.thread.join(timeout=IDLE_SECONDS)
        assert not server.thread.is_alive()
        for connection in connections:
            connection.close()


@pytest.mark.ci
def test_what_is_not_answered_in_the_time_for_draining_is_told_so(caplog):
    answers: list[httpx.Response] = []

    def ask(url: str, stream: bool) -> None:
        body = {**LONG, "stream": stream}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

    with (
        running_server(embeddings=False, drain_seconds=1) as server,
        no_tracebacks(caplog),
        slowed(server, 1),
    ):
        connections = unfinished(server)
        threads = [threading.Thread(target=ask, args=(server.url, s)) for s in (True, False)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.server.running_requests == 2)
        server.server.stop()
        for thread in threads:
            thread.join()
        server.thread.join()
        for connection in connections:
            connection.close()
    whole, stream = sorted(answers, key=lambda answer: answer.status_code, reverse=True)
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "server_stopping"
    *_, failure, done = stream.text.split("\n\n")[:-1]
    assert "the server stopped before the answer was complete" in failure
    assert done == "data: [DONE]"
    statuses = [r.fields["status"] for r in caplog.records if hasattr(r, "fields")]
    assert statuses == [503] * 4
