"""The server's endpoints, and what stands around each: keys, limits, errors, log and metrics.

An answer ends with its client: a disconnect cancels the work, also that of a stream of events.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxllm.common.errors import InputError, JaxLLMError
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.serve.http.answers import ENDPOINTS, Answer, Usage, chat_ids, prompt_ids
from jaxllm.serve.http.api_types import (
    ApiError,
    DetokenizeRequest,
    EmbeddingRequest,
    SamplingFields,
    TokenizeRequest,
    api_error,
    read_body,
    stopped_error,
)
from jaxllm.serve.http.state import NoEngine, ServerState, Startup

T = TypeVar("T")

END_SECONDS = 1.0
"""Time in which the last events of a stream must be sent when the server ends."""
CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics where the client went away (nginx's)."""
_LOG = logging.getLogger("jaxllm.serve")
Endpoint: TypeAlias = Callable[["HttpCall"], Awaitable[Response]]


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


class HttpCall:
    """One request to an endpoint, from its first byte to its line in the log."""

    def __init__(self, server: Startup, path: str, request: Request) -> None:
        self.server, self.path, self.request = server, path, request
        self.settings = server.settings
        self.id, self.usage = uuid.uuid4().hex, Usage()
        self.headers = {"x-request-id": self.id}

    async def read(self, request_class: type[T]) -> T:
        """The body as a request to this server's model, within the limits of size and time."""
        limits, receive = self.settings.limits, self.request.receive
        body = await read_limited(receive, limits.body_bytes, limits.client_seconds)
        request: Any = read_body(request_class, body)
        self.settings.check_model(request.model)
        return request

    async def state(self) -> ServerState:
        """The state of the server, for which a request waits that comes before the model is ready.

        Raises:
            ApiError: it waits too long, or the server does not start.
            ClientGoneError: the client disconnects.
        """
        if self.server.state is not None:
            return self.server.state
        return await until_disconnect(self.request.receive, self.server.wait())

    def json(self, content: Any, status: int = 200) -> JSONResponse:
        """An answer."""
        return JSONResponse(content, status, self.headers)

    def check_key(self) -> None:
        """Compares the request's key with all of the server's, in constant time."""
        keys = self.settings.api_keys
        if keys is None:
            return
        kind, _, key = self.request.headers.get("authorization", "").partition(" ")
        # The bytes as they came, which starlette decoded as Latin-1.
        matches = [hmac.compare_digest(key.strip().encode("latin-1"), known) for known in keys]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401, "Authorization: expected a valid API key (Bearer ...)", code="invalid_api_key"
            )

    def check_origin(self) -> None:
        """Refuses work for a page of another origin. A browser keeps the answer from it, but sends
        some requests all the same."""
        origin, allowed = self.request.headers.get("origin"), self.settings.cors_origins
        if self.request.method != "POST" or origin is None or {origin, "*"}.intersection(allowed):
            return
        raise ApiError(
            403,
            f"Origin: pages of {origin:.100} may not call this server, unless it is started with "
            "--cors-origin",
        )

    def end(self, status: int, error: ApiError | None = None) -> None:
        """Counts and logs the request; the log has no prompt and no answer."""
        usage, metrics = self.usage, self.server.metrics
        seconds = time.perf_counter() - usage.start
        metrics.requests.labels(self.path, status).inc()
        metrics.seconds.labels(self.path).observe(seconds)
        if usage.first_token_seconds is not None:
            metrics.first_token.labels(self.path).observe(usage.first_token_seconds)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.new_tokens.inc(usage.completion_tokens)
        log_request(
            status,
            error,
            self.request.client,
            id=self.id,
            method=self.request.method,
            path=self.path,
            seconds=round(seconds, 4),
            first_token_seconds=usage.first_token_seconds,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cut_texts=usage.cut_texts,
        )


def log_request(
    status: int, error: ApiError | None, client: Sequence[Any] | None, **fields: Any
) -> None:
    """Logs a request: its status, its client, and why it was refused, without texts of prompts.

    Args:
        client: host and port.
        fields: what else is known of the request.
    """
    fields = {"event": "request", **fields, "status": status, "client": client and client[0]}
    if error is not None:
        fields |= {"reason": error.reason, "field": error.param, "code": error.code}
    _LOG.info("request", extra={"fields": fields})


def endpoint(
    server: Startup,
    path: str,
    answer: Endpoint,
    method: str = "POST",
    *,
    open_to_all: bool = False,
) -> Route:
    """A route whose errors are answers in OpenAI's format.

    Args:
        open_to_all: no API key is asked for.
    """

    async def handle(request: Request) -> Response:
        call = HttpCall(server, path, request)
        status, failure = 500, None
        try:
            call.check_origin()
            if not open_to_all:
                call.check_key()
            response = await answer(call)
            status = response.status_code
        except ClientGoneError:
            status, response = CLIENT_CLOSED_REQUEST, Response(status_code=CLIENT_CLOSED_REQUEST)
        except (Exception, asyncio.CancelledError) as error:
            failure = _failure(error, call)
            status, headers = failure.status, {**failure.headers, **call.headers}
            response = JSONResponse(failure.to_json(), status, headers)
        if not isinstance(response, EventStream):  # which ends later
            call.end(status, failure)
        return response

    return Route(path, handle, methods=[method])


def _failure(error: BaseException, call: HttpCall) -> ApiError:
    """The answer's error for an exception."""
    if isinstance(error, asyncio.CancelledError):  # the server's time for draining is over
        return stopped_error()
    if isinstance(error, ApiError):
        return error
    if isinstance(error, JaxLLMError):
        return api_error(error)
    if isinstance(error, TimeoutError):
        seconds = call.settings.limits.request_seconds
        return ApiError(504, f"the answer took longer than {seconds:g} seconds")
    fields = {"event": "error", "id": call.id}
    _LOG.error("internal error", exc_info=error, extra={"fields": fields})
    return ApiError(500, f"internal error; see the server's log, request {call.id}")


async def completions(
    request_class: type[SamplingFields], answer_class: type[Answer], call: HttpCall
) -> Response:
    """Answers messages or continues prompts, whole or as a stream."""
    request = await call.read(request_class)
    state = await call.state()
    answer = answer_class(state, request, call.usage)
    if isinstance(state.engine, NoEngine):
        raise ApiError(404, "the model has no language-model head; this server only embeds")
    async with asyncio.timeout(state.limits.request_seconds):
        streams = await answer.start()
        if not request.stream:
            work = answer.whole(streams)
            return call.json(await until_disconnect(call.request.receive, work))

    def end(status: int, failure: ApiError | None) -> None:
        for stream in streams:  # of a client that went away before the first event, too
            stream.cancel()
        call.end(status, failure)

    seconds = state.limits.request_seconds
    return EventStream(answer.events(streams), seconds, end, call.headers)


async def embeddings(call: HttpCall) -> Response:
    """Embeds texts."""
    request = await call.read(EmbeddingRequest)
    state = await call.state()
    if state.embedder is None:
        raise ApiError(404, "embeddings are not served; start the server with --embeddings")
    embedder, unpooled, inputs = state.embedder, 0, request.inputs
    prompt = embedder.recipe.prompt(request.prompt_name, request.prompt)
    if (request.prompt_name or request.prompt) is not None and not isinstance(inputs[0], str):
        raise InputError("prompt_name, prompt: have no effect on token ids; leave them out")

    def tokenize(texts: list[str], **options: Any) -> dict[str, Any]:
        nonlocal unpooled
        encode = functools.partial(state.tokenize, "__call__", **options)
        rows, unpooled, call.usage.cut_texts = embedder.encode(texts, prompt, encode)
        return {"input_ids": rows}

    ids = await state.in_thread(prompt_ids, state, inputs, "input", None, tokenize)
    call.usage.prompt_tokens = sum(map(len, ids))
    embed = with_settings_of_this_thread(embedder.embed)
    vectors = await asyncio.to_thread(embed, ids, unpooled)

    def encoded(vector: np.ndarray) -> Any:
        if request.encoding_format == "float":
            return vector.tolist()
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")

    data = [
        {"object": "embedding", "index": index, "embedding": encoded(vector)}
        for index, vector in enumerate(vectors)
    ]
    tokens = call.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "cut_texts": call.usage.cut_texts}
    return call.json({"object": "list", "data": data, "model": state.model_name, "usage": usage})


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "jaxllm",
        "max_model_len": state.engine.context,
    }


async def models(call: HttpCall) -> Response:
    """Lists the one model."""
    return call.json({"object": "list", "data": [_model(await call.state())]})


async def model(call: HttpCall) -> Response:
    """The model with the name in the path."""
    call.settings.check_model(call.request.path_params["name"])
    return call.json(_model(await call.state()))


async def tokenize(call: HttpCall) -> Response:
    """Token ids of a prompt or of messages."""
    request = await call.read(TokenizeRequest)
    state = await call.state()
    if request.messages is not None:
        ids = await state.in_thread(chat_ids, state, request, request.tools is not None)
    else:
        encode = functools.partial(
            state.tokenize,
            "encode",
            request.prompt or "",
            add_special_tokens=request.add_special_tokens,
            max_bytes=state.limits.body_bytes,
        )
        ids = await state.in_thread(encode)
    return call.json({"tokens": ids, "count": len(ids), "max_model_len": state.engine.context})


async def detokenize(call: HttpCall) -> Response:
    """Text of token ids."""
    request = await call.read(DetokenizeRequest)
    state = await call.state()
    text = await asyncio.to_thread(state.tokenizer.decode, request.tokens)
    return call.json({"prompt": text})


async def health(call: HttpCall) -> Response:
    """200 while requests run, 503 before, and after the engine has failed."""
    status = call.server.status()
    return call.json(status, 200 if status["status"] == "ok" else 503)


async def metrics(call: HttpCall) -> Response:
    """Metrics for Prometheus."""
    content, content_type = call.server.metrics.render()
    return Response(content, headers={**call.headers, "content-type": content_type})


class _Cors(CORSMiddleware):
    """Answers browsers' questions whether a page may call the server; logs those it refuses."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope) if scope["type"] == "http" else None
        asks = {"origin", "access-control-request-method"}
        if request and request.method == "OPTIONS" and asks.issubset(request.headers):
            answer = self.preflight_response(request.headers)
            if answer.status_code >= 400:
                error = ApiError(answer.status_code, bytes(answer.body).decode())
                log_request(error.status, error, request.client, method="OPTIONS")
            return await answer(scope, receive, send)
        return await super().__call__(scope, receive, send)


def make_app(server: Startup) -> Starlette:
    """The ASGI application."""
    routes = [
        *(
            endpoint(server, path, functools.partial(completions, *classes))
            for path, classes in ENDPOINTS.items()
        ),
        endpoint(server, "/v1/embeddings", embeddings),
        endpoint(server, "/v1/models", models, "GET"),
        endpoint(server, "/v1/models/{name:path}", model, "GET"),
        endpoint(server, "/tokenize", tokenize),
        endpoint(server, "/detokenize", detokenize),
        endpoint(server, "/health", health, "GET", open_to_all=True),
        endpoint(server, "/metrics", metrics, "GET"),
    ]

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"][:100]
        failure = ApiError(error.status_code, f"{request.method} {path}: {error.detail}")
        log_request(failure.status, failure, request.client, method=request.method, path=path)
        return JSONResponse(failure.to_json(), failure.status, error.headers)

    middleware = []
    if server.settings.cors_origins:
        middleware.append(
            Middleware(
                _Cors,
                allow_origins=list(server.settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: http_error}
    )
