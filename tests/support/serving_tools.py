"""A real server on a free port of the loopback interface, in a thread of the tests' process.

All servers and engines have slots of one size, so that their programs are compiled once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import tiny
from small_tokenizers import DATA

from jaxllm.batch.row_tasks import Embedder
from jaxllm.serve import AsyncEngine
from jaxllm.serve.http.server import HttpServer, bound_socket
from jaxllm.serve.http.state import Limits, ServerSettings, ServerState, Startup
from jaxllm.serve.text_worker import TextWorker
from jaxllm.tokenizers import LlamaTokenizer
from jaxllm.tokenizers.settings import TokenizerSettings

CHAT_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}({{ call.function.arguments.x }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer() -> LlamaTokenizer:
    """A small tokenizer with a chat template."""
    settings = TokenizerSettings(chat_templates={"default": CHAT_TEMPLATE})
    return LlamaTokenizer((DATA / "llama.model").read_bytes(), settings, {})


@dataclasses.dataclass
class RunningServer:
    """A server that takes requests."""

    url: str
    engine: AsyncEngine
    state: ServerState
    server: HttpServer
    thread: threading.Thread


@contextlib.contextmanager
def running_server(
    model: Any = None,
    tokenizer: Any = None,
    *,
    limits: Limits | None = None,
    api_keys: tuple[bytes, ...] | None = None,
    cors_origins: tuple[str, ...] = (),
    drain_seconds: float = 60.0,
    embeddings: bool = True,
    embedder: Embedder | None = None,
    while_loading: Callable[[Startup], object] | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """Runs a server until the block ends; raises what ended it.

    Args:
        while_loading: called before the model is loaded. The block begins at the same time.
    """
    tokenizer = tokenizer or chat_tokenizer()
    if model is None:
        model = tiny.make("llama", num_hidden_layers=1, vocab_size=len(tokenizer))
    engine = AsyncEngine(
        model, tokenizer, **{"slots": 4, "context": 64, "kept_prefixes": 0, **options}
    )
    state = ServerState(
        engine=engine,
        tokenizer=tokenizer,
        model_name="tiny",
        limits=limits or Limits(),
        api_keys=api_keys,
        embedder=embedder or (Embedder(model, engine.context) if embeddings else None),
        texts=TextWorker(tokenizer),
        cors_origins=cors_origins,
    )
    if state.embedder is not None and options.get("warm_up") == "background":
        engine.programs.add(state.embedder.programs())
    bound = bound_socket("127.0.0.1", 0)
    ready, failures = threading.Event(), []

    def load(startup: Startup) -> ServerState:
        if while_loading is not None:
            ready.set()
            while_loading(startup)
        return state

    settings = {
        field.name: getattr(state, field.name) for field in dataclasses.fields(ServerSettings)
    }
    server = HttpServer(ServerSettings(**settings), bound, load, drain_seconds=drain_seconds)

    def main() -> None:
        try:
            asyncio.run(server.run(ready.set))
        except BaseException as failure:
            failures.append(failure)
        finally:
            ready.set()

    thread = threading.Thread(target=main, name="server")
    thread.start()
    ready.wait()
    try:
        if not failures:
            url = "http://{}:{}".format(*bound.getsockname())
            wait_until_open(bound.getsockname())
            yield RunningServer(url, engine, state, server, thread)
    finally:
        server.stop()
        thread.join()
        if failures and state.texts is not None:
            state.texts.close()
    if failures:
        raise failures[0]


def wait_until_open(address: tuple[str, int]) -> None:
    """Connects until the server listens."""
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(address).close()
            return
        time.sleep(0.01)
    raise TimeoutError(address)


def connected(server: RunningServer) -> socket.socket:
    """A new connection to a server."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


@contextlib.contextmanager
def slowed(server: RunningServer, seconds: float) -> Generator[None]:
    """Decode calls take this long, so that requests are still running when something happens."""
    pool: Any = server.engine._run._pool
    decode = pool.decode

    def slow_decode(*arguments: int) -> Any:
        time.sleep(seconds)
        return decode(*arguments)

    pool.decode = slow_decode
    try:
        yield
    finally:
        pool.decode = decode


def eventually(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


@contextlib.contextmanager
def no_tracebacks(caplog: pytest.LogCaptureFixture) -> Generator[None]:
    """Nothing inside logs a traceback."""
    gc.collect()  # a task whose exception nobody reads is logged when it is collected
    caplog.clear()
    with caplog.at_level(logging.INFO):
        yield
        gc.collect()
    lines = [logging.Formatter().format(r) for r in caplog.records if r.exc_info]
    assert not lines, "\n".join(lines)
