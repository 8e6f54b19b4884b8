"""State that the endpoints of a server share: its settings, its metrics, and the model.

The port opens before the model is loaded. `Startup` is what there is from then on, and a
`ServerState` what there is once the model is loaded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from jaxllm.batch.row_tasks import Embedder
from jaxllm.batch.slot_pool import BatchCounts
from jaxllm.common.compiling import CompileClock
from jaxllm.common.optional_packages import require
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.generation.processors.grammar import GrammarLogitsProcessor, json_schema
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.model import Model
from jaxllm.serve.admission import PrefixCounts
from jaxllm.serve.async_engine import AsyncEngine
from jaxllm.serve.http.api_types import (
    RETRY_SECONDS,
    ApiError,
    ResponseFormat,
    SamplingFields,
    stopped_error,
)
from jaxllm.serve.programs import Programs
from jaxllm.serve.text_worker import TextWorker
from jaxllm.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")

_GRAMMARS = 32
"""Compiled schemas that are kept."""
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Counters, histograms, and gauges of an engine, in a registry of their own.

    Args:
        engine: returns the engine, which may be another one after the model is loaded.
    """

    def __init__(self, engine: Callable[[], AsyncEngine | NoEngine]) -> None:
        client = require("prometheus_client", extra="serve", purpose="metrics")
        self._client = client
        self._registry = client.CollectorRegistry()

        def metric(kind: Any, name: str, doc: str, *labels: str, **options: Any) -> Any:
            return kind(f"jaxllm_{name}", doc, labels, registry=self._registry, **options)

        def histogram(name: str, doc: str) -> Any:
            return metric(client.Histogram, name, doc, "path", buckets=_SECONDS)

        doc = "Requests by path and status"
        self.requests = metric(client.Counter, "requests", doc, "path", "status")
        self.seconds = histogram("request_seconds", "Time of a request")
        doc = "Time from a request to its first token"
        self.first_token = histogram("time_to_first_token_seconds", doc)
        self.prompt_tokens = metric(client.Counter, "prompt_tokens", "Tokens of prompts")
        self.new_tokens = metric(client.Counter, "new_tokens", "Generated tokens")
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "running_sequences": ("Sequences in slots", lambda: engine().running),
            "waiting_sequences": ("Sequences that wait for a slot", lambda: engine().waiting),
            "slots": ("Sequences that can be decoded at once", lambda: engine().slots),
            "decode_steps": ("Decode steps since the start", lambda: engine().counts.decode_steps),
            "programs": ("Programs", lambda: len(engine().programs.names)),
            "compiled_programs": ("Compiled programs", lambda: engine().programs.compiled),
            "prefix_hits": ("Prompts with a kept prefix", lambda: engine().prefix_counts.hits),
            "prefix_tokens": (
                "Prompt tokens that a kept prefix saved",
                lambda: engine().prefix_counts.tokens,
            ),
        }
        for name, (doc, value) in gauges.items():
            metric(client.Gauge, name, doc).set_function(value)

    def render(self) -> tuple[bytes, str]:
        """The metrics as text, and its content type."""
        return self._client.generate_latest(self._registry), self._client.CONTENT_TYPE_LATEST


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a request."""

    body_bytes: int = 4 * 2**20
    client_seconds: float = 30.0
    """Time in which a client must send the headers of a request, and then its body."""
    request_seconds: float = 600.0
    """Time from the request, or from the end of the server's start, to the last byte of the
    answer."""
    start_seconds: float = 60.0
    """Time that a request waits for the end of the server's start."""


@dataclasses.dataclass
class NoEngine:
    """Stands for the engine of a model without a head, which only embeds."""

    model: Model[Any] | None
    context: int
    needed_programs: int = 0
    """Programs of embeddings that are compiled before requests run."""
    programs: Programs = dataclasses.field(default_factory=Programs)
    running, waiting, slots = 0, 0, 0
    counts, prefix_counts = BatchCounts(), PrefixCounts()

    @property
    def failure(self) -> BaseException | None:
        """Error of a program; None while requests run."""
        return self.programs.failure

    async def start(self) -> None:
        """Compiles programs, the rest of them in the background."""
        await asyncio.to_thread(
            with_settings_of_this_thread(self.programs.compile), self.needed_programs
        )
        self.programs.compile_in_background()

    async def close(self, *, drain: bool = True) -> None:
        """Compiles nothing more."""
        self.programs.stop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a model is served, which is known before it is loaded.

    Args:
        model_name: its name in requests and answers.
        api_keys: None: no key is asked for.
        cors_origins: origins whose pages may call the server; "*": all.
    """

    model_name: str
    limits: Limits = Limits()
    api_keys: tuple[bytes, ...] | None = None
    cors_origins: tuple[str, ...] = ()
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if a request names another model."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"model: this server has {self.model_name!r}, not {name!r:.100}",
                param="model",
                code="model_not_found",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerState(ServerSettings):
    """A model behind its engine, and how it is served.

    Args:
        engine: an `AsyncEngine`, or a `NoEngine`.
        embedder: None: /v1/embeddings is not served.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    embedder: Embedder | None = None
    texts: TextWorker | None = None
    """Where texts are tokenized. None: in this process, whose caller is trusted."""

    def tokenize(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the tokenizer, under the limits of `texts`."""
        if self.texts is None:
            return getattr(self.tokenizer, method)(*arguments, **options)
        return self.texts.call(method, *arguments, **options)

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function that tokenizes in a thread, of which there are enough for slow texts."""
        threads = None if self.texts is None else self.texts.threads
        return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)

    async def grammar(self, response_format: ResponseFormat | None) -> Any:
        """The grammar that an answer must match, or None."""
        if response_format is None or response_format.type == "text":
            return None
        schema: dict[str, Any] = {"type": "object"}
        if response_format.json_schema is not None:
            schema = response_format.json_schema.schema
        compiled = with_settings_of_this_thread(self._compiled)
        return await asyncio.to_thread(compiled, json.dumps(schema))

    @functools.cached_property
    def _compiled(self) -> Any:
        def compile_schema(schema: str) -> GrammarLogitsProcessor:
            eos = self.engine.eos_token_ids
            return json_schema(schema, self.tokenizer, eos_token_id=eos)

        return functools.lru_cache(maxsize=_GRAMMARS)(compile_schema)

    def fields(self, request: SamplingFields) -> dict[str, Any]:
        """The generation fields of a request. What it does not set is as the engine's fields or
        generation_config.json have it, or else as in OpenAI's interface: sampling at temperature 1
        without filters. Greedy search has one result, however many choices are asked for."""
        config = self.engine.model.generation_config or GenerationConfig()
        defaults = {**config.to_dict(), **self.engine.fields}
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        fields: dict[str, Any] = {name: getattr(request, name) for name in penalties}
        fields = {name: value for name, value in fields.items() if value is not None}
        if request.logit_bias:
            fields["logit_bias"] = request.logit_bias
        if request.min_tokens:
            fields["min_new_tokens"] = request.min_tokens
        if request.ignore_eos:
            fields["eos_token_id"] = None
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        sampling = {name: getattr(request, name) for name in neutral}
        for name, value in sampling.items():
            if value is None:
                sampling[name] = defaults.get(name, neutral[name])
        is_greedy = request.temperature is None and self.engine.fields.get("do_sample") is False
        if is_greedy or sampling["temperature"] == 0:
            return {**fields, "do_sample": False, "num_return_sequences": 1}
        return {**fields, "do_sample": True, "num_return_sequences": request.samples, **sampling}


class Startup:
    """A server from the opening of its port on.

    Args:
        settings: of the server. A `ServerState` is a server that takes requests.

    Attributes:
        state: the model, once requests can run.
        metrics: for Prometheus.
        warm_up_seconds: time from the first program to the first request that can run.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.state: ServerState | None = None
        self.metrics = ServerMetrics(lambda: self._engine)
        self.warm_up_seconds = 0.0
        self._engine: AsyncEngine | NoEngine = NoEngine(None, 0)
        self._clock: CompileClock | None = None
        self._needed, self._compile_start = 0, 0.0
        self._ended = asyncio.Event()
        if isinstance(settings, ServerState):
            self.end(settings)

    def begin_compiling(self, needed: int) -> None:
        """Notes how many programs are compiled before requests can run."""
        self._needed = needed
        if self._clock is None:
            self._clock, self._compile_start = CompileClock(), time.perf_counter()

    def end(self, state: ServerState | None) -> None:
        """Has requests run, those that wait too.

        Args:
            state: None: the server does not start, and all requests get an error.
        """
        if self._clock is not None:
            self.warm_up_seconds = time.perf_counter() - self._compile_start
            self._clock.close()
            self._clock = None
        self.state = state
        if state is not None:
            self._engine = state.engine
        self._ended.set()

    @property
    def programs(self) -> Programs:
        """The programs of the server; none before the model is loaded."""
        return self._engine.programs

    async def wait(self) -> ServerState:
        """The state of the server, once requests can run.

        Raises:
            ApiError: they cannot within `start_seconds`, or the server does not start.
        """
        seconds = self.settings.limits.start_seconds
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            raise ApiError(
                503,
                f"the server still loads or compiles the model after {seconds:g} seconds; try "
                "again later",
                code="server_starting",
                retry_after=RETRY_SECONDS,
            ) from None
        if self.state is None:
            raise stopped_error()
        return self.state

    def status(self) -> dict[str, Any]:
        """The server's status, as /health answers it; "ok" while it takes requests."""
        if self._ended.is_set():
            failed = self.state is None or self._engine.failure is not None
            return {"status": "failed" if failed else "ok"}
        if self._clock is None:
            return {"status": "loading"}
        program = min(self._clock.programs + 1, self._needed)
        return {"status": "compiling", "program": program, "of": self._needed}

    def progress(self) -> str:
        """What is compiled at this moment, in words; empty before and after."""
        clock, status = self._clock, self.status()
        if clock is None or "program" not in status:
            return ""
        verb = "reading" if clock.cached and clock.cached == clock.programs else "compiling"
        return (
            f"{verb} program {status['program']} of {status['of']}, "
            f"{clock.seconds_so_far:.0f} s so far, {clock.cached} from the cache"
        )
