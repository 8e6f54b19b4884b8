"""Answers of chat and text completions: what both have in common."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError
from jaxllm.serve.async_engine import GenerationStream
from jaxllm.serve.http.api_types import SamplingFields
from jaxllm.serve.http.pieces import Choice, Piece, collect, pieces_of
from jaxllm.serve.http.state import ServerState

MAX_PROMPTS = 128


@dataclasses.dataclass
class Usage:
    """Tokens of a request so far, for its answer, the log and the metrics."""

    prompt_tokens: int = 0
    lengths: Counter[int] = dataclasses.field(default_factory=Counter)
    """New tokens of each choice."""
    first_token_seconds: float | None = None
    start: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def completion_tokens(self) -> int:
        """New tokens of all choices."""
        return self.lengths.total()

    def count(self, piece: Piece) -> None:
        """Counts the tokens of a piece."""
        self.lengths[piece.index] += len(piece.tokens)
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.start

    def to_json(self) -> dict[str, int]:
        """The `usage` of an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Answer:
    """The choices of one request, whole or in pieces.

    Subclasses say what a choice looks like in JSON.
    """

    object = ""
    chunk_object = ""
    id_prefix = ""
    default_new_tokens: float = math.inf
    """New tokens of a request without a limit; fewer where the slot ends."""
    limit_field = "max_tokens"
    """The request's field that limits the new tokens."""

    def __init__(self, state: ServerState, request: SamplingFields, usage: Usage) -> None:
        self.state, self.request, self.usage = state, request, usage
        self.tokenizer = state.tokenizer
        self._copies = 1
        """Choices that each generated sample stands for: greedy search has one result."""
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": state.model_name,
        }

    async def start(self) -> list[GenerationStream]:
        """Makes token ids of the prompts, and queues them."""
        raise NotImplementedError

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | None,
        *,
        logprobs: bool,
        **row_fields: str,
    ) -> list[GenerationStream]:
        """Queues the prompts.

        Args:
            prompts: token ids.
            max_new_tokens: None: `default_new_tokens`.
            row_fields: fields of each row beside those of `ServerState.fields`.

        Raises:
            JaxLLMError: a field is wrong, a prompt is too long, or the queue is full.
        """
        state, seed = self.state, self.request.seed
        if len(prompts) > MAX_PROMPTS:
            raise InputError(f"prompt: {len(prompts)} prompts, but at most {MAX_PROMPTS} are taken")
        grammar = await state.grammar(self.request.response_format)
        fields = await asyncio.to_thread(state.fields, self.request)
        fields |= row_fields
        fields["seed"] = secrets.randbits(32) if seed is None else seed % 2**32
        if not fields["do_sample"]:
            self._copies = self.request.samples
        context, is_encoder_decoder = state.engine.context, state.engine.model.is_encoder_decoder
        rows = []
        for ids in prompts:
            taken = 1 if is_encoder_decoder else len(ids)
            if taken >= context:
                raise InputError(
                    f"prompt: has {len(ids)} tokens, but a prompt and its answer have {context} "
                    "together; shorten it"
                )
            most = context - taken
            limit = max_new_tokens or int(min(self.default_new_tokens, most))
            if limit > most:
                raise InputError(
                    f"{self.limit_field}: {limit} new tokens are asked for, but a prompt and its "
                    f"answer have {context} together; ask for at most {most}"
                )
            if self.request.min_tokens > limit:
                raise InputError(
                    f"min_tokens: {self.request.min_tokens} tokens at least are asked for, but "
                    f"the limit is {limit}; lower min_tokens, or raise {self.limit_field}"
                )
            rows.append({"input_ids": np.asarray(ids), "max_new_tokens": limit, **fields})
        streams = state.engine.submit_all(rows, logprobs=logprobs, grammar=grammar)
        self.usage.prompt_tokens = sum(stream.prompt_tokens for stream in streams)
        return streams

    def selected(self, choices: list[Choice]) -> list[Choice]:
        """The choices that are the answer, of all that were generated."""
        return choices

    async def whole(self, streams: Sequence[GenerationStream]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = self.selected(await collect(self._pieces(streams), self._count(streams)))
        return {
            **self._head,
            "object": self.object,
            "choices": [
                {"index": index, **self.choice(choice)} for index, choice in enumerate(choices)
            ],
            "usage": self.usage.to_json(),
        }

    async def events(self, streams: Sequence[GenerationStream]) -> AsyncIterator[dict[str, Any]]:
        """The events of an answer that is streamed."""
        options = self.request.stream_options
        with_usage = options is not None and options.include_usage

        def event(choices: Iterable[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
            body = {**self._head, "object": self.chunk_object, "choices": list(choices)}
            return {**body, "usage": usage} if with_usage else body

        for first in self.first_choices(self._count(streams)):
            yield event([first])
        async for piece in self._pieces(streams):
            for choice in self.piece_choices(piece):
                yield event([{"index": piece.index, **choice}])
        if with_usage:
            yield event([], self.usage.to_json())

    def _count(self, streams: Sequence[GenerationStream]) -> int:
        """Number of choices of all prompts."""
        return sum(stream.row.samples for stream in streams) * self._copies

    async def _pieces(self, streams: Sequence[GenerationStream]) -> AsyncIterator[Piece]:
        try:
            async for piece in pieces_of(streams, self.tokenizer, self.request.stops):
                for copy in range(self._copies):
                    index = piece.index * self._copies + copy
                    choice_piece = dataclasses.replace(piece, index=index)
                    self.usage.count(choice_piece)
                    yield choice_piece
        finally:
            for stream in streams:
                stream.cancel()

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def first_choices(self, count: int) -> list[dict[str, Any]]:
        """Choices of events before the first token."""
        return []

    def piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices of the events of one piece, for one event or several."""
        raise NotImplementedError
