"""The server with clients that break HTTP or leave at any moment: nothing of it is a traceback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import socket
import struct
from collections.abc import Iterator

import httpx
import pytest
from serving_tools import RunningServer, connected, eventually, no_tracebacks, running_server

from jaxllm.serve.http.state import Limits

pytestmark = pytest.mark.ci

COMPLETION = json.dumps({"prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
STREAM = json.dumps({"prompt": "a", "max_tokens": 12, "ignore_eos": True, "stream": True}).encode()


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    """A request with a body."""
    lines = [b"POST %s HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def chunked(body: bytes, path: bytes = b"/v1/completions") -> bytes:
    """A request whose body has chunked encoding, given as its bytes on the wire."""
    return b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path + body


GOOD = [
    post(COMPLETION),
    post(STREAM),
    post(COMPLETION, b"Expect: 100-continue"),
    post(COMPLETION) + post(STREAM) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    chunked(b"%x\r\n%s\r\n0\r\n\r\n" % (len(COMPLETION), COMPLETION)),
    post(COMPLETION, b"Connection: close"),
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
]
BAD = [
    b"\x00" * 100,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x80" * 64,  # a client that speaks TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /health\r\n",
    b"GET  HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\xfe /\xff HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%00%ed%a0%80 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models/%ff%00%0d%0a?%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models/ HTTP/1.1\r\nHost: [::1\r\n\r\n",
    b"GET /health/ HTTP/1.1\r\nHost: a b/\\\xff\r\n\r\n",
    b"GET http://[x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\nmore",
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: \x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n X: folded\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: \xff\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhelloGARBAGE\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: \xff,,\r\nX-Forwarded-Proto: \xff\r\n"
    b"\r\n",
    b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    post(COMPLETION, b"Content-Length: 7"),
    post(COMPLETION, b"Content-Length: -7"),
    post(COMPLETION, b"Content-Encoding: gzip"),
    post(COMPLETION, b"Transfer-Encoding: chunked"),
    post(COMPLETION, b"Transfer-Encoding: gzip"),
    post(COMPLETION, b"Expect: 200-ok"),
    post(COMPLETION, b"Origin: \xff\xfe"),
    post(b"\xff\xfe\x00", b"Content-Type: \xff"),
    post(COMPLETION) + b"\x00garbage\r\n\r\n",
    post(STREAM) + b"\x00garbage\r\n\r\n",
    chunked(b"zz\r\n"),
    chunked(b"-1\r\n\r\n"),
    chunked(b"5\r\nabcdefghij\r\n0\r\n\r\n"),
    chunked(b"f" * 30 + b"\r\n"),
    chunked(b"5;" + b"x" * 20_000),
    chunked(b"0\r\nX: \x00\r\n\r\n"),
    chunked(b"zz\r\n", b"/nothing"),
    chunked(b"zz\r\n", b"/health"),
    b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Expect: 100-continue\r\n\r\nzz\r\n",
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits = Limits(body_bytes=50_000, client_seconds=0.2)
    with running_server(limits=limits, queue_size=64, embeddings=False) as server:
        yield server


def reset(connection: socket.socket) -> None:
    """Closes a connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def attack(server: RunningServer, parts: list[bytes], end: str, read: int) -> None:
    """Sends the parts, perhaps reads some bytes, and goes away."""
    with connected(server) as connection, contextlib.suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
        if end == "half":
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError as error:  # the server has refused the request and is gone already
                if error.errno != errno.ENOTCONN:
                    raise
        if read:
            connection.recv(read)
        if end == "reset":
            reset(connection)


def answers(server: RunningServer) -> None:
    """The server still works, and nothing runs on."""
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 20
    eventually(lambda: server.engine.running == server.engine.waiting == 0)


def test_requests_that_are_not_http(server, caplog):
    with no_tracebacks(caplog):
        for request in BAD:
            for middle in (0, len(request) // 2):
                for end, read in [("close", 0), ("reset", 0), ("half", 2000), ("reset", 1)]:
                    attack(server, [request[:middle], request[middle:]], end, read)
        answers(server)


def test_clients_that_leave_at_any_moment(server, caplog):
    rng = random.Random(0)
    with no_tracebacks(caplog):
        for _ in range(200):
            request = rng.choice(GOOD)
            is_whole = rng.random() < 0.5
            cut = len(request) if is_whole else rng.randrange(len(request))
            middle, end = rng.randrange(cut + 1), rng.choice(["close", "reset", "half"])
            read = rng.choice([0, 1, 300]) if is_whole else 0
            attack(server, [request[:middle], request[middle:cut]], end, read)
        answers(server)


def test_more_connections_than_the_system_allows(server, caplog):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with no_tracebacks(caplog), contextlib.ExitStack() as stack:
        answers(server)  # what is opened once is open
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limits[1]))
        try:
            for _ in range(2):  # the second time takes what the server needs for the last one
                with contextlib.suppress(OSError):
                    while True:
                        last = stack.enter_context(connected(server))
                last.close()
            eventually(lambda: "too many are open" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        eventually(lambda: not server.server._server.server_state.connections)
        answers(server)
