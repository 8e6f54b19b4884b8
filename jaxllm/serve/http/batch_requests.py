"""Requests of an OpenAI batch file, answered as the server answers them, without HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput, RawRow, checked_seed
from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError
from jaxllm.common.validation import from_plain
from jaxllm.models.decoder import GenerativeModel
from jaxllm.serve.async_engine import AsyncEngine, EngineStoppedError
from jaxllm.serve.http.answers import ENDPOINTS, Usage
from jaxllm.serve.http.api_types import api_error, read_body
from jaxllm.serve.http.state import Limits, ServerState
from jaxllm.tokenizers.tokenizer import Tokenizer

STEPS_PER_CALL = 16
"""Decode steps after which finished requests are replaced by waiting ones."""
REQUESTS_PER_SLOT = 4
"""Requests that are in work at once, so that no slot waits for one."""
MAX_BODY = 2**26
"""Bytes of a prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """A line of an OpenAI batch file."""

    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredRequest(BatchOutput):
    """The result of a request, with its line in OpenAI's format."""

    line: dict[str, Any]
    choice_lengths: tuple[int, ...] = ()

    @property
    def new_lengths(self) -> tuple[int, ...]:
        return self.choice_lengths

    def to_dict(self) -> dict[str, Any]:
        return self.line


class BatchRequests:
    """Answers requests of an OpenAI batch file, in slots that are refilled.

    A request's result is that of the server's endpoint for its body. One without a `seed` draws
    with a seed that follows from `seed` and its number in the file.

    Args:
        model_name: `model` in the answers; the requests' own is not compared.
        context: tokens of a prompt and its answer; as `AsyncEngine`.
        max_new_tokens: of requests that set no limit; None: a completion has 16, as in OpenAI's
            interface, and a chat as many as the context allows.
        announce: called with the predicted memory.
        slots, memory, fields: as `AsyncEngine`.

    Raises:
        JaxLLMError: as `AsyncEngine`; or there is no tokenizer.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer | None,
        *,
        model_name: str,
        slots: int | None = None,
        memory: int | str | None = None,
        context: int | None = None,
        seed: int = 0,
        max_new_tokens: int | None = None,
        announce: Callable[[Prediction], object] = lambda prediction: None,
        **fields: Any,
    ) -> None:
        if tokenizer is None:
            raise UnsupportedError(f"{model_name}: has no tokenizer, which requests need")
        if "num_return_sequences" in fields:
            raise InputError("num_return_sequences: requests of a batch file have `n` for this")
        self._engine = AsyncEngine(
            model,
            tokenizer,
            slots=slots,
            memory=memory,
            context=context,
            queue_size=2**31,  # `_answers` bounds what waits
            steps_per_call=STEPS_PER_CALL,
            warm_up=False,
            **fields,
        )
        announce(self._engine.memory)
        self._seed, self._max_new_tokens = checked_seed(seed), max_new_tokens
        self._state = ServerState(
            engine=self._engine,
            tokenizer=tokenizer,
            model_name=model_name,
            limits=Limits(body_bytes=MAX_BODY),
        )
        self.counts = self._engine.counts
        self.memory: Sequence[Prediction] = [self._engine.memory]

    def answer(self, rows: Iterable[RawRow]) -> Generator[AnsweredRequest, None, None]:
        """Results in the order in which requests end; called once.

        Raises:
            JaxLLMError: the engine has failed.
        """
        answers = self._answers(rows)
        with asyncio.Runner() as runner:
            try:
                while (output := runner.run(anext(answers, None))) is not None:
                    self.counts.work_done += 1
                    self.counts.add_output(output)
                    yield output
            finally:
                runner.run(answers.aclose())

    async def _answers(self, rows: Iterable[RawRow]) -> AsyncGenerator[AnsweredRequest, None]:
        waiting = iter(rows)
        limit = REQUESTS_PER_SLOT * self._engine.slots
        running: set[asyncio.Task[AnsweredRequest]] = set()
        async with self._engine:
            try:
                while True:
                    for row in itertools.islice(waiting, limit - len(running)):
                        self.counts.rows_read += 1
                        self.counts.work += 1
                        running.add(asyncio.create_task(self._answer(row)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, row: RawRow) -> AnsweredRequest:
        usage, request_id = Usage(), f"batch_req_{uuid.uuid4().hex}"
        # A row that is no request is called by its line, if nothing else names it.
        custom_id = row.id if isinstance(row.id, str) else None

        def line(response: dict[str, Any] | None, error: Any = None) -> dict[str, Any]:
            names = {"id": request_id, "custom_id": custom_id}
            return {**names, "response": response, "error": error}

        def response(status: int, body: dict[str, Any]) -> dict[str, Any]:
            return {"status_code": status, "request_id": request_id, "body": body}

        def failed(error: JaxLLMError, line: dict[str, Any]) -> AnsweredRequest:
            kind = type(error).__name__
            return AnsweredRequest(
                index=row.index, id=row.row_id, error=str(error), error_kind=kind, line=line
            )

        try:
            if isinstance(row.raw, JaxLLMError):
                raise row.raw
            request = from_plain(BatchRequest, row.raw)
        except JaxLLMError as error:
            message = str(error)
            if custom_id is None and not message.startswith("line "):
                message = f"line {row.id}: {message}"
            problem = {"code": "invalid_request", "message": message}
            return failed(error, line(None, problem))
        custom_id = request.custom_id
        try:
            body = await self._body(row.index, request, usage)
        except EngineStoppedError as error:  # no fault of the request
            raise self._engine.failure or error from None
        except JaxLLMError as error:
            failure = api_error(error)
            return failed(error, line(response(failure.status, failure.to_json())))
        return AnsweredRequest(
            index=row.index,
            id=row.row_id,
            finish_reasons=tuple(choice["finish_reason"] for choice in body["choices"]),
            prompt_tokens=usage.prompt_tokens,
            choice_lengths=tuple(usage.lengths.values()),
            line=line(response(200, body)),
        )

    async def _body(self, index: int, batch_request: BatchRequest, usage: Usage) -> dict[str, Any]:
        request_class, answer_class = ENDPOINTS[batch_request.url]
        request = read_body(request_class, json.dumps(batch_request.body).encode())
        if request.stream:
            raise InputError("stream: a batch has no streams; leave it out")
        changes: dict[str, Any] = {}
        if request.seed is None:
            changes["seed"] = int(np.random.default_rng([self._seed, index]).integers(2**32))
        limits = (request.max_tokens, getattr(request, "max_completion_tokens", None))
        if self._max_new_tokens is not None and limits == (None, None):
            changes["max_tokens"] = self._max_new_tokens
        answer = answer_class(self._state, dataclasses.replace(request, **changes), usage)
        return await answer.whole(await answer.start())
