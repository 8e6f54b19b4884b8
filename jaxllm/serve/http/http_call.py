"""One request to the server: its body, its key, and its line in the log."""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from jaxllm.serve.http.answers import Usage
from jaxllm.serve.http.api_errors import ApiError
from jaxllm.serve.http.state import ServerState
from jaxllm.serve.http.streaming import read_limited

_LOG = logging.getLogger("jaxllm.serve")


class HttpCall:
    """One request to an endpoint, from its first byte to its line in the log."""

    def __init__(self, state: ServerState, path: str, request: Request) -> None:
        self.state, self.path, self.request = state, path, request
        self.id, self.usage = uuid.uuid4().hex, Usage()
        self.headers = {"x-request-id": self.id}

    async def body(self) -> bytes:
        """The body, within the limits of size and time."""
        limits = self.state.limits
        return await read_limited(self.request.receive, limits.body_bytes, limits.client_seconds)

    def json(self, content: Any, status: int = 200) -> JSONResponse:
        """An answer."""
        return JSONResponse(content, status, self.headers)

    def check_key(self) -> None:
        """Compares the request's key with all of the server's, in constant time."""
        keys = self.state.api_keys
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
        origin, allowed = self.request.headers.get("origin"), self.state.cors_origins
        if self.request.method != "POST" or origin is None or {origin, "*"}.intersection(allowed):
            return
        raise ApiError(
            403,
            f"Origin: pages of {origin:.100} may not call this server, unless it is started with "
            "--cors-origin",
        )

    def end(self, status: int) -> None:
        """Counts and logs the request; the log has no prompt and no answer."""
        usage, metrics = self.usage, self.state.metrics
        seconds = time.perf_counter() - usage.start
        metrics.requests.labels(self.path, status).inc()
        metrics.seconds.labels(self.path).observe(seconds)
        if usage.first_token_seconds is not None:
            metrics.first_token.labels(self.path).observe(usage.first_token_seconds)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.new_tokens.inc(usage.completion_tokens)
        fields = {
            "event": "request",
            "id": self.id,
            "method": self.request.method,
            "path": self.path,
            "status": status,
            "seconds": round(seconds, 4),
            "first_token_seconds": usage.first_token_seconds,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        }
        _LOG.info("request", extra={"fields": fields})
