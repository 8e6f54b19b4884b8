"""Bodies of requests, and errors as answers, in OpenAI's format.

A field that is not declared here is an error that names it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from jaxllm.common.errors import (
    InputError,
    JaxLLMError,
    TemplateError,
    UnsupportedError,
    WorkerStoppedError,
)
from jaxllm.common.files import parse_json
from jaxllm.common.validation import from_plain
from jaxllm.serve.async_engine import EngineStoppedError, QueueFullError
from jaxllm.serve.live_run import MAX_TOP_LOGPROBS

T = TypeVar("T")
Prompts = Annotated[
    str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...],
    "a string, a list of strings, token ids, or a list of lists of token ids",
]

MAX_CHOICES = 128
MAX_STOPS = 16
MIN_TEMPERATURE = 1e-30
"""The least temperature above 0."""
_KNOWN_UNSUPPORTED = {
    "audio",
    "echo",
    "function_call",
    "functions",
    "logprobs_mode",
    "modalities",
    "prediction",
    "prompt_logprobs",
    "reasoning_effort",
    "suffix",
    "use_beam_search",
    "web_search_options",
}
"""Fields of OpenAI's and other servers' interfaces that are not implemented here."""
_OPTION_OBJECTS = {"stream_options", "response_format", "json_schema"}
"""Fields that are objects of options, in which null is the same as no value. In a JSON schema and
in messages it has a meaning."""
_TEMPLATE_ARGUMENTS = {"tokenize", "tools", "chat_template", "max_bytes", "documents"}
"""Arguments of `apply_chat_template` that are the server's to set."""
MAX_MESSAGE = 500
"""Characters of a message, which may repeat a part of the request."""
RETRY_SECONDS = 5
"""Seconds after which to try again when the server or its engine stops."""
_STRANGE_FIELD = re.compile(r"^(?![\w.\[\]-]{1,100}:).*(?=: unknown)", re.DOTALL)
"""An unknown field whose name is no name, and may be any text."""
_REPEATED = re.compile(
    r"""(?<=found\ )(?!-?[\d.e+-]+\b).*
    |(?<=^json_schema:\ ).*
    |(?<!\w)(["'])(?:\\.|(?!\1(?!\w)).)*(?:\1|$)""",
    re.VERBOSE | re.DOTALL,
)
"""Parts of messages that may repeat a text of the request: found values, what the library of JSON
schemas says, and what is in quotes."""
_UNKNOWN_FIELD = re.compile(r"^([\w.\[\]-]+)(?=: unknown)")
_FIELD = re.compile(r"`?([a-z_][a-z0-9_.\[\]]*)`?(?=:| must | names )")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted, and not used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonSchema:
    """The schema of a `response_format`."""

    schema: dict[str, Any]
    name: str = ""
    description: str = ""
    strict: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """Requested format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def __post_init__(self) -> None:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema: is given if and only if type is json_schema")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """Fields that chat and text completions share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, "a map from token ids to numbers"] = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    """Accepted, and not used."""
    metadata: Annotated[dict[str, str] | None, "a map of strings"] = None
    """Accepted, and not used."""
    service_tier: str | None = None
    """Accepted, and not used."""
    prompt_cache_key: str | None = None
    """Accepted, and not used."""
    prompt_cache_retention: str | None = None
    """Accepted, and not used."""
    safety_identifier: str | None = None
    """Accepted, and not used."""
    store: bool = False
    """Accepted with a warning in the log: answers are never stored."""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise ValueError(f"n: expected 1 to {MAX_CHOICES}, found {self.n}")
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise ValueError(f"stop: expected at most {MAX_STOPS} strings, none of them empty")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature: expected 0 to 2, found {self.temperature}")
        if self.temperature is not None and 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature: {self.temperature} is too close to 0; give 0 for greedy decoding"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected 1 or more, found {self.max_tokens}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens: expected 0 or more, found {self.min_tokens}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: has no effect without stream")

    @property
    def samples(self) -> int:
        """Number of choices that are generated of each prompt."""
        return self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else self.stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[tuple[dict[str, Any], ...], "a list of messages"]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: Annotated[str | tuple[Any, ...] | dict[str, Any] | None, "a list of tools"] = None
    """A list of tools, or JSON text of one."""
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool = True
    """False: the answer has at most one call, the first."""
    chat_template_kwargs: Annotated[
        dict[str, bool] | None, "a map of switches of the template, true or false"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.messages:
            raise ValueError("messages: expected one or more")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise ValueError("max_completion_tokens: expected 1 or more")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: give max_completion_tokens or max_tokens, not both")
        reserved = _TEMPLATE_ARGUMENTS.intersection(self.chat_template_kwargs or ())
        if reserved:
            raise ValueError(f"chat_template_kwargs: {min(reserved)} is no switch of a template")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs: expected 0 to {MAX_TOP_LOGPROBS}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: has no effect without logprobs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    prompt: Prompts
    logprobs: int | None = None
    best_of: int | None = None
    """Choices that are generated, of which the `n` most probable ones are the answer."""
    src_lang: str | None = None
    """Language of the prompts, for a translation model."""
    tgt_lang: str | None = None
    """Language of the answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None and not self.n <= self.best_of <= MAX_CHOICES:
            raise ValueError(f"best_of: expected n ({self.n}) to {MAX_CHOICES}")
        if self.best_of is not None and self.stream:
            raise ValueError("best_of cannot be combined with stream")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs: expected 0 to {MAX_TOP_LOGPROBS}")

    @property
    def samples(self) -> int:
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts one by one."""
        return one_by_one("prompt", self.prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """Body of /v1/embeddings."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    prompt_name: str | None = None
    prompt: str | None = None

    @property
    def inputs(self) -> list[str | tuple[int, ...]]:
        """The texts one by one."""
        return one_by_one("input", self.input)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeRequest:
    """Body of /tokenize: a prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[tuple[dict[str, Any], ...] | None, "a list of messages"] = None
    tools: Annotated[str | tuple[Any, ...] | dict[str, Any] | None, "a list of tools"] = None
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give prompt or messages")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools: have no effect without messages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetokenizeRequest:
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[tuple[int, ...], "a list of token ids"]


def one_by_one(name: str, value: Any) -> list[str | tuple[int, ...]]:
    """A prompt, or a list of them, as a list."""
    if isinstance(value, str) or (value and isinstance(value[0], int)):
        return [value]
    if not value:
        raise InputError(f"{name}: is empty")
    for number, prompt in enumerate(value):
        if not prompt:
            what = "has no text" if prompt == "" else "has no token ids"
            raise InputError(f"{name}[{number}]: {what}; it must not be empty")
    return list(value)


def read_body(cls: type[T], body: bytes) -> T:
    """Reads a body; null, also in options such as `stream_options`, and what switches an
    unsupported field off, as if it were not there.

    Raises:
        JaxLLMError: it is not JSON, or a field is unknown, not supported or wrong.
    """
    raw = parse_json(body, source="body", error=InputError)
    if not isinstance(raw, Mapping):
        raise InputError("body: expected a JSON object")
    fields = _without_nulls(raw)
    declared = {field.name for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    for name in _KNOWN_UNSUPPORTED & fields.keys() - declared:
        if (value := fields.pop(name)) is not False and value not in ("", [], {}):
            raise UnsupportedError(f"{name}: not supported by this server")
    return from_plain(cls, fields)


def _without_nulls(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value, in nested objects of options too."""
    return {
        name: _without_nulls(value)
        if name in _OPTION_OBJECTS and isinstance(value, Mapping)
        else value
        for name, value in options.items()
        if value is not None
    }


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
    def reason(self) -> str:
        """The message for the log, without what it repeats of the request.

        >>> ApiError(400, "stop: expected a string, found {'my secret': 1}").reason
        'stop: expected a string, found ...'
        """
        message = str(self)
        if isinstance(self.__cause__, TemplateError):  # after its kind, the template's own words
            message = ": ".join(message.split(": ")[:2])
        return _REPEATED.sub("...", _STRANGE_FIELD.sub("...", message))[:MAX_MESSAGE]

    @property
    def type(self) -> str:
        """OpenAI's name of the kind of error."""
        names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
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
        fields = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}


def api_error(error: JaxLLMError) -> ApiError:
    """The answer for an error of the library: 429 if the queue is full, 503 if the engine or
    the process that tokenizes has stopped, 500 for logits that are not finite, and else 400, since
    the request is wrong.

    >>> from jaxllm.common.errors import InputError
    >>> api_error(InputError("top_p: expected a number")).param
    'top_p'
    """
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="engine_stopped", retry_after=RETRY_SECONDS)
    if isinstance(error, WorkerStoppedError):
        return ApiError(503, str(error), code="worker_stopped", retry_after=RETRY_SECONDS)
    if isinstance(error, FloatingPointError):
        return ApiError(500, str(error), code="non_finite")
    message = str(error).removeprefix("generate(): ")  # clients call no function
    field = _UNKNOWN_FIELD.match(message)
    if field is None and not _STRANGE_FIELD.match(message):
        field = _FIELD.search(message)
    answer = ApiError(400, message, param=field[1] if field else None)
    answer.__cause__ = error
    return answer


def stopped_error() -> ApiError:
    """The answer to a request that was not answered in the server's time for draining."""
    return ApiError(
        503,
        "the server stopped before the answer was complete",
        code="server_stopping",
        retry_after=RETRY_SECONDS,
    )
