"""``jaxllm serve MODEL``: a server with OpenAI's interface."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import math
import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.cli.devices import add_mesh_flag, local_mesh
from jaxllm.cli.options import (
    POOLINGS,
    add_field_flags,
    add_model,
    add_model_flags,
    generation_fields,
    load_named,
)
from jaxllm.cli.process import Flags, Parser, add_flags, command, path, signals
from jaxllm.common.errors import InputError, MissingFileError, quoted
from jaxllm.common.files import read_text
from jaxllm.common.optional_packages import require
from jaxllm.common.progress import PLAIN_SECONDS, Reporter
from jaxllm.serve.async_engine import DEFAULT_QUEUE_SIZE, AsyncEngine

if TYPE_CHECKING:
    from jaxllm.serve.http.state import ServerSettings, ServerState, Startup

POLL_SECONDS = 0.1
"""Time between two looks at whether a signal has come."""
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")
_EXAMPLES = """\
examples:
  jaxllm serve path/to/model
  jaxllm serve google-t5/t5-small --port 9000 --slots 32
  jaxllm serve path/to/model --host 0.0.0.0 --api-keys keys.txt
"""
_ENGINE_FLAGS: Flags = {
    "--slots N": "the number of sequences that are decoded at once (default: chosen by memory)",
    "--memory MEMORY": "the memory to use on each device, such as 12GB",
    "--context TOKENS": "the tokens of a prompt and its answer together (at most 2048)",
    "--queue-size N": {
        "default": DEFAULT_QUEUE_SIZE,
        "help": f"the number of sequences that may wait; more are refused with status 429 "
        f"({DEFAULT_QUEUE_SIZE})",
    },
    "--steps-per-call N": {"default": 4, "help": "the tokens that a stream sends at once (4)"},
    "--kept-prefixes N": "the number of common beginnings of prompts, such as system prompts, "
    "whose KV cache is kept (4)",
    "--compile-all": "compile all programs before requests run, which then compile nothing "
    "(default: the rest while requests run)",
    "--embeddings": {
        "nargs": "?",
        "const": "auto",
        "choices": POOLINGS,
        "help": "also serve /v1/embeddings: the mean over all tokens, the last token's or the "
        "first one's (default: as the checkpoint states, else the mean)",
    },
}
"""Options of the engine, for `add_flags`."""
_HTTP_FLAGS: Flags = {
    "--host HOST": {"default": "127.0.0.1", "help": "the address to listen on (127.0.0.1)"},
    "--port N": {"default": 8000, "help": "the port to listen on; 0 takes a free one (8000)"},
    "--api-keys FILE": {
        "type": path,
        "help": "a file with the keys of clients, one on each line",
    },
    "--cors-origin ORIGIN": {
        "action": "append",
        "default": [],
        "help": "a web origin whose pages may call the server; may be repeated (none)",
    },
    "--max-body BYTES": {"default": 4 * 2**20, "help": "the largest body of a request (4 MiB)"},
    "--client-seconds S": {
        "default": 30.0,
        "help": "the seconds in which a client must send its headers, and then its body (30)",
    },
    "--request-seconds S": {
        "default": 600.0,
        "help": "the longest time of a request, in seconds (600)",
    },
    "--start-seconds S": {
        "default": 60.0,
        "help": "the seconds that a request waits while the model loads and compiles (60)",
    },
    "--drain-seconds S": {
        "default": 60.0,
        "help": "the seconds that running requests have to finish after SIGTERM (60)",
    },
}
"""Options of HTTP, for `add_flags`."""


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        "[MODEL]",
        description="Serve a checkpoint over HTTP, with OpenAI's interface.",
        epilog=_EXAMPLES,
    )
    add_model(parser)
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the name of the model in requests"
    )
    add_model_flags(parser)
    add_mesh_flag(parser)
    add_flags(parser.add_argument_group("engine"), _ENGINE_FLAGS)
    add_flags(parser.add_argument_group("HTTP"), _HTTP_FLAGS)
    add_field_flags(parser, in_server=True)
    return parser


def api_keys(path: Path | None) -> tuple[bytes, ...] | None:
    """The keys of a file: one per line, without empty lines and those that begin with #.

    Raises:
        MissingFileError: it cannot be read.
        InputError: it has no key.
    """
    if path is None:
        return None
    text = read_text(path, max_bytes=2**20, error=MissingFileError)
    # Some editors begin a file with a byte order mark.
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    keys = tuple(line.encode() for line in lines if line and not line.startswith("#"))
    if not keys:
        raise InputError(f"{path}: has no API key; write one per line")
    return keys


def _check(arguments: argparse.Namespace) -> None:
    """Checks the options of HTTP."""
    if arguments.served_model_name == "":
        raise InputError("--served-model-name: expected a name, found an empty text")
    if not 0 <= arguments.port < 2**16:  # the system would take its last 16 bits
        raise InputError(f"--port: expected 0 to {2**16 - 1}, found {arguments.port}")
    if arguments.max_body < 1:
        raise InputError(f"--max-body: expected 1 or more bytes, found {arguments.max_body}")
    for name in ("client_seconds", "request_seconds", "start_seconds"):
        seconds = getattr(arguments, name)
        if not 0 < seconds < math.inf:
            option = name.replace("_", "-")
            raise InputError(f"--{option}: expected a number above 0, found {seconds}")
    if not 0 <= arguments.drain_seconds < math.inf:
        raise InputError(
            f"--drain-seconds: expected a number of 0 or more, found {arguments.drain_seconds}"
        )
    for origin in arguments.cors_origin:
        if not _ORIGIN.fullmatch(origin):  # browsers send no other, so that it would never match
            raise InputError(
                f"--cors-origin: expected * or an origin such as http://localhost:3000, without a "
                f"path or a slash at its end, found {quoted(origin)}"
            )


def _run(arguments: argparse.Namespace) -> int:
    for module in ("starlette", "uvicorn", "prometheus_client"):
        require(module, extra="serve", purpose="servers")
    from jaxllm.serve.http.server import bound_socket  # only now, since it imports these packages

    _check(arguments)
    keys = api_keys(arguments.api_keys)
    settings = _settings(arguments, keys)
    with bound_socket(arguments.host, arguments.port) as bound:
        return _serve(arguments, settings, bound)


def _settings(arguments: argparse.Namespace, keys: tuple[bytes, ...] | None) -> ServerSettings:
    """What is known of the server before its model is loaded."""
    from jaxllm.serve.http.state import Limits, ServerSettings

    return ServerSettings(
        model_name=arguments.served_model_name or Path(arguments.model).absolute().stem,
        limits=Limits(
            arguments.max_body,
            arguments.client_seconds,
            arguments.request_seconds,
            arguments.start_seconds,
        ),
        api_keys=keys,
        cors_origins=tuple(arguments.cors_origin),
    )


def _serve(arguments: argparse.Namespace, settings: ServerSettings, bound: socket.socket) -> int:
    """Serves until a signal comes."""
    from jaxllm.serve.http.server import HttpServer, logs_to_stderr

    load = functools.partial(_load, arguments, settings)
    server = HttpServer(settings, bound, load, drain_seconds=arguments.drain_seconds)
    startup = server.startup
    host, port = bound.getsockname()[:2]

    async def serve() -> None:
        ready = asyncio.Event()
        stopped = signals.stop_after(lambda: _running(server.running_requests))

        def on_ready() -> None:
            stopped()  # before requests run
            ready.set()

        async def stop_on_signal() -> None:
            signals.say(f"http://{host}:{port} is open; requests wait until the model is ready")
            while not ready.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ready.wait(), PLAIN_SECONDS)
                    break
                if progress := startup.progress():
                    signals.say(progress)
            signals.say(f"compiling: {startup.warm_up_seconds:.1f} s")
            signals.say(f"serving {settings.model_name} on http://{host}:{port}")
            programs, start = startup.programs, time.monotonic()
            while not stopped():
                if start is not None and programs.compiled == len(programs.names):
                    seconds = time.monotonic() - start
                    signals.say(f"all {programs.compiled} programs are compiled: {seconds:.1f} s")
                    start = None
                await asyncio.sleep(POLL_SECONDS)
            server.stop()

        watcher = asyncio.create_task(stop_on_signal())
        await server.run(on_ready)
        watcher.cancel()

    with logs_to_stderr():
        asyncio.run(serve())
    number = signals.received()
    if number is not None and startup.programs.is_compiling:
        os._exit(128 + number)  # Python would wait for the program that is being compiled
    return 0


def _running(count: int) -> str:
    """Describes the requests that are answered before the server stops.

    >>> _running(0), _running(1), _running(3)
    ('', 'the request that runs', 'the 3 requests that run')
    """
    if count < 2:
        return "the request that runs" if count else ""
    return f"the {count} requests that run"


def _load(arguments: argparse.Namespace, settings: ServerSettings, startup: Startup) -> ServerState:
    """Loads the model, and compiles the programs by which its memory is predicted."""
    from jaxllm.batch.row_tasks import Embedder
    from jaxllm.serve.http.state import NoEngine, ServerState
    from jaxllm.serve.text_worker import TextWorker

    reporter = Reporter()
    mesh = local_mesh(arguments)
    model, tokenizer = load_named(arguments, mesh, reporter, needs_tokenizer="a server")
    engine: Any
    if arguments.embeddings is not None and not hasattr(model, "init_cache"):
        engine = NoEngine(model, arguments.context or model.config.default_window, 1)
    else:
        names = ("slots", "memory", "context", "queue_size", "steps_per_call", "kept_prefixes")
        options = {name: getattr(arguments, name) for name in names}
        options["warm_up"] = arguments.compile_all or "background"
        options["on_compile"] = startup.begin_compiling
        engine = AsyncEngine(model, tokenizer, **options, **generation_fields(arguments))
        reporter.say(str(engine.memory))
    embedder = None
    if arguments.embeddings is not None:
        embedder = Embedder(model, engine.context, arguments.embeddings, tokenizer=tokenizer)
        kinds, most = " and ".join(embedder.recipe.pooling), embedder.context
        reporter.say(f"embeddings: {kinds} pooling, up to {most} tokens")
        engine.programs.add(embedder.programs())
    if arguments.compile_all:
        engine.needed_programs = len(engine.programs.names)
    startup.begin_compiling(engine.needed_programs)
    return ServerState(
        **vars(settings),
        engine=engine,
        tokenizer=tokenizer,
        embedder=embedder,
        texts=TextWorker(tokenizer),
    )


main = command(_parser, _run, "jaxllm serve")
