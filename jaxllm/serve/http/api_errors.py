"""Errors of the HTTP interface, in OpenAI's format."""

from __future__ import annotations

import re
from typing import Any

from jaxllm.common.errors import JaxLLMError
from jaxllm.serve.engine_thread import EngineStoppedError, QueueFullError

MAX_MESSAGE = 500
"""Characters of a message, which may repeat a part of the request."""
RETRY_SECONDS = 5
"""Seconds after which to try again when the server or its engine stops."""
_FIELD = re.compile(r"`?([a-z_][a-z0-9_.\[\]]*)`?(?=:| must | names )")


class ApiError(Exception):
    """An error answer.

    The answer of status 408 closes the connection, since the rest of a body may follow.

    Args:
        status: HTTP status code.
        param: the field of the request that is wrong.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 408:
            self.headers["Connection"] = "close"

    @property
    def type(self) -> str:
        """OpenAI's name of the kind of error."""
        names = {
            401: "authentication_error",
            404: "not_found_error",
            429: "rate_limit_error",
        }
        default = "invalid_request_error" if self.status < 500 else "server_error"
        return names.get(self.status, default)

    def to_json(self) -> dict[str, Any]:
        """The body of the answer.

        >>> ApiError(400, "n: too many", param="n").to_json()["error"]["type"]
        'invalid_request_error'
        """
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "..."
        error = {
            "message": message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def api_error(error: JaxLLMError) -> ApiError:
    """The answer for an error of the library: 429 if the queue is full, 503 if the engine has
    stopped, 500 for logits that are not finite, and else 400, since the request is wrong.

    >>> from jaxllm.common.errors import InputError
    >>> api_error(InputError("top_p: expected a number")).param
    'top_p'
    """
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="engine_stopped", retry_after=RETRY_SECONDS)
    if isinstance(error, FloatingPointError):
        return ApiError(500, str(error), code="non_finite")
    message = str(error).removeprefix("generate(): ")  # clients call no function
    field = _FIELD.search(message)
    return ApiError(400, message, param=field[1] if field else None)


def stopped_error() -> ApiError:
    """The answer to a request that was not answered in the server's time for draining."""
    return ApiError(
        503,
        "the server stopped before the answer was complete",
        code="server_stopping",
        retry_after=RETRY_SECONDS,
    )
