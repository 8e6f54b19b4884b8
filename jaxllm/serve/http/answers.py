"""Answers of chat and text completions, whole or as events."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import logging
import math
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from jaxllm.batch.rows import TokenLogprob
from jaxllm.common.errors import InputError
from jaxllm.generation.settings.resolve import target_settings
from jaxllm.serve.async_engine import GenerationStream
from jaxllm.serve.http.api_types import ChatRequest, CompletionRequest, SamplingFields
from jaxllm.serve.http.pieces import (
    START,
    Piece,
    ToolCall,
    collect,
    overlap,
    pieces_of,
    split_tool_calls,
    tool_names,
)
from jaxllm.serve.http.state import ServerState
from jaxllm.tokenizers.messages import read_tools
from jaxllm.tokenizers.tokenizer import Tokenizer

_LOG = logging.getLogger("jaxllm.serve")

MAX_PROMPTS = 128
FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclasses.dataclass
class Usage:
    """Tokens of a request so far, for its answer, the log and the metrics."""

    prompt_tokens: int = 0
    cut_texts: int = 0
    """Texts to embed that were cut to the most tokens that the model takes."""
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


class Answer(abc.ABC):
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
    first_event: ClassVar[dict[str, Any] | None] = None
    """A choice in the event before its first token; None: there is no such event."""

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

    @abc.abstractmethod
    async def start(self) -> list[GenerationStream]:
        """Makes token ids of the prompts, and queues them."""

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
        if self.request.store:
            message = "store: accepted, but this server stores no answers"
            _LOG.warning(message, extra={"fields": {"event": "warning", "field": "store"}})
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
                room = f"a prompt and its answer have {context} together"
                if is_encoder_decoder:
                    room = f"the decoder has {context} positions, one of them for its start token"
                raise InputError(
                    f"{self.limit_field}: {limit} new tokens are asked for, but {room}; ask for at "
                    f"most {most}"
                )
            if self.request.min_tokens > limit:
                raise InputError(
                    f"min_tokens: {self.request.min_tokens} tokens at least are asked for, but "
                    f"the limit is {limit}; lower min_tokens, or raise {self.limit_field}"
                )
            rows.append({"input_ids": np.asarray(ids), "max_new_tokens": limit, **fields})
        submit = state.engine.submit_in_thread
        streams = await submit(rows, logprobs=logprobs, grammar=grammar)
        self.usage.prompt_tokens = sum(stream.prompt_tokens for stream in streams)
        return streams

    def selected(self, choices: list[Piece]) -> list[Piece]:
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

        if self.first_event is not None:
            for index in range(self._count(streams)):
                yield event([{"index": index, **self.first_event}])
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

    @abc.abstractmethod
    def choice(self, choice: Piece) -> dict[str, Any]:
        """A whole choice."""

    @abc.abstractmethod
    def piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices of the events of one piece, for one event or several."""


class CompletionAnswer(Answer):
    """The continuations of one or more prompts."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"
    default_new_tokens = 16
    request: CompletionRequest

    def __init__(self, state: ServerState, request: CompletionRequest, usage: Usage) -> None:
        super().__init__(state, request, usage)
        self._unplaced: dict[int, list[tuple[int, TokenLogprob]]] = {}
        """Tokens of each choice whose place in the text is not known yet."""

    async def start(self) -> list[GenerationStream]:
        """Tokenizes the prompts and queues them."""
        request = self.request
        if any(isinstance(prompt, str) for prompt in request.prompts):
            fields = self.state.engine.fields if request.tgt_lang is None else None
            target_settings(self.state.engine.model, self.tokenizer, fields, request.tgt_lang)
        prompts = (request.prompts, "prompt", request.src_lang)
        ids = await self.state.in_thread(prompt_ids, self.state, *prompts)
        logprobs = request.logprobs is not None or request.best_of is not None
        language = {} if request.tgt_lang is None else {"tgt_lang": request.tgt_lang}
        return await self.submit(ids, request.max_tokens, logprobs=logprobs, **language)

    def selected(self, choices: list[Piece]) -> list[Piece]:
        """The `n` most probable choices of each prompt, the best first, with `best_of`."""
        request = self.request
        if request.best_of is None:
            return choices
        best: list[Piece] = []
        for start in range(0, len(choices), request.samples):
            of_prompt = choices[start : start + request.samples]
            of_prompt.sort(key=lambda choice: choice.mean_logprob, reverse=True)
            best += of_prompt[: request.n]
        return best

    def choice(self, choice: Piece) -> dict[str, Any]:
        return self.piece_choices(choice)[0]

    def piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        logprobs = None
        if piece.logprobs is not None and self.request.logprobs is not None:
            waiting = self._unplaced.pop(piece.index, [])
            waiting += zip(piece.tokens, piece.logprobs, strict=True)
            count = len(piece.offsets)
            self._unplaced[piece.index] = waiting[count:]
            if count:
                logprobs = completion_logprobs(
                    self.tokenizer, waiting[:count], piece.offsets, self.request.logprobs
                )
        if not piece.text and piece.finish_reason is None and logprobs is None:
            return []  # the text waits for the next token
        return [{"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}]


def prompt_ids(
    state: ServerState,
    prompts: list[str | tuple[int, ...]],
    name: str,
    src_lang: str | None = None,
    tokenize: Callable[..., Any] | None = None,
) -> list[list[int]]:
    """The token ids of prompts, whose texts are in the language `src_lang`.

    Args:
        prompts: all of them texts, or all of them token ids.
        tokenize: encodes texts instead of the tokenizer's call.

    Raises:
        InputError: a prompt is empty or too long, or has an id that the model does not know.
    """
    model, texts = state.engine.model, [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts:
        if name == "input" or model.is_encoder_decoder:
            for number, text in enumerate(texts):
                state.tokenizer.check_not_blank(text, f"{name}[{number}]")
        options = {"max_bytes": state.limits.body_bytes, "src_lang": src_lang}
        batch = (tokenize or partial(state.tokenize, "__call__"))(texts, **options)
        rows: list[list[int]] = batch["input_ids"]
    elif src_lang is not None:
        raise InputError("src_lang: has no effect on token ids; leave it out")
    else:
        rows = [list(map(int, prompt)) for prompt in prompts]
    size = model.config.vocab_size
    if not all(ids and min(ids) >= 0 and max(ids) < size for ids in rows):
        raise InputError(f"{name}: expected one token id or more, from 0 to {size - 1}")
    return rows


class ChatAnswer(Answer):
    """The answer to messages."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    first_event: ClassVar[dict[str, Any] | None] = {
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    request: ChatRequest

    def __init__(self, state: ServerState, request: ChatRequest, usage: Usage) -> None:
        super().__init__(state, request, usage)
        has_tools = request.tools is not None and request.tool_choice != "none"
        self._tools = tool_names(read_tools(request.tools) or ()) if has_tools else []
        self._held: dict[int, str] = {}
        if request.max_completion_tokens is not None:
            self.limit_field = "max_completion_tokens"

    async def start(self) -> list[GenerationStream]:
        """Renders the messages and queues them."""
        request = self.request
        ids = await self.state.in_thread(chat_ids, self.state, request, bool(self._tools))
        limit = request.max_completion_tokens or request.max_tokens
        return await self.submit([ids], limit, logprobs=request.logprobs)

    def choice(self, choice: Piece) -> dict[str, Any]:
        content, calls = self._split(choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        reason = choice.finish_reason
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [call.to_json() for call in calls]
            reason = "tool_calls"
        return {"message": message, "logprobs": self._logprobs(choice), "finish_reason": reason}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """The log-probabilities of a piece's tokens, if the request asks for them."""
        if not self.request.logprobs:
            return None
        top, logprobs = self.request.top_logprobs, piece.logprobs or ()
        return chat_logprobs(self.tokenizer, piece.tokens, logprobs, top)

    def piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        (delta, reason), logprobs = self._delta(piece), self._logprobs(piece)
        if not delta and reason is None and logprobs is None:
            return []  # the text waits for the next token
        return [{"delta": delta, "logprobs": logprobs, "finish_reason": reason}]

    def _split(self, text: str) -> tuple[str, list[ToolCall]]:
        """The content and the tool calls of a text, of which the request may want one alone."""
        content, calls = split_tool_calls(text, self._tools)
        return content, calls if self.request.parallel_tool_calls else calls[:1]

    def _delta(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """Delta of a piece, and its finish reason.

        Text that may be a tool call is held back to the end of the choice.
        """
        text, reason = piece.text, piece.finish_reason
        if self._tools:
            text = self._held.pop(piece.index, "") + text
            if reason is None:
                start = _possible_call(text)
                text, self._held[piece.index] = text[:start], text[start:]
            else:
                text, calls = self._split(text)
                if calls:
                    deltas = [{"index": i, **call.to_json()} for i, call in enumerate(calls)]
                    content = {"content": text} if text else {}
                    return {**content, "tool_calls": deltas}, "tool_calls"
        return ({"content": text} if text else {}), reason


ENDPOINTS: dict[str, tuple[type[SamplingFields], type[Answer]]] = {
    "/v1/chat/completions": (ChatRequest, ChatAnswer),
    "/v1/completions": (CompletionRequest, CompletionAnswer),
}
"""The classes of the requests to the endpoints that generate, and of their answers."""


def _possible_call(text: str) -> int:
    """Start of a tool call or of a possible one; the length of the text if there is none.

    >>> _possible_call("Well, <tool_c"), _possible_call(' {"name"'), _possible_call("no")
    (6, 0, 2)
    """
    if text.lstrip().startswith("{"):
        return 0
    start = text.find(START)
    return start if start >= 0 else len(text) - overlap(text, START)


def chat_ids(state: ServerState, request: Any, with_tools: bool) -> list[int]:
    """The token ids of messages in the model's chat template.

    Args:
        request: has `messages`, and perhaps `tools` and `chat_template_kwargs`.
    """
    options = dict(getattr(request, "chat_template_kwargs", None) or {})
    if with_tools:
        options["tools"] = request.tools
    ids = state.tokenize(
        "apply_chat_template",
        request.messages,
        max_bytes=state.limits.body_bytes,
        **options,
    )
    assert isinstance(ids, list)
    return ids


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int] | None]:
    """A token's text inside a sequence, and its bytes; the text of a part of a character has
    replacement characters."""
    content = tokenizer.token_bytes()[token] if token < len(tokenizer) else None
    if content is None:
        return "", None
    return content.decode("utf-8", "replace"), list(content)


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    top_logprobs: int,
) -> dict[str, Any]:
    """The `logprobs` of a choice of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, content = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, FLOOR), "bytes": content}

    return {
        "content": [
            entry(token, item.logprob)
            | {"top_logprobs": [entry(*pair) for pair in item.top[:top_logprobs]]}
            for token, item in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[tuple[int, TokenLogprob]],
    offsets: Sequence[int],
    top_logprobs: int,
) -> dict[str, Any]:
    """The `logprobs` of a choice of a text completion.

    Args:
        tokens: each with its log-probability.
        offsets: characters of the text before each token.
    """
    return {
        "tokens": [token_name(tokenizer, token) for token, _ in tokens],
        "token_logprobs": [max(item.logprob, FLOOR) for _, item in tokens],
        "top_logprobs": [
            named_logprobs(tokenizer, token, item.top[:top_logprobs]) for token, item in tokens
        ],
        "text_offset": list(offsets),
    }


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI writes them (`bytes:\\xe2`)."""
    text, content = token_text(tokenizer, token)
    if content is None:
        return f"token_id:{token}"
    is_whole = bytes(content) == text.encode()
    return text if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def named_logprobs(
    tokenizer: Tokenizer, chosen: int, top: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Log-probabilities of the most probable tokens by their names.

    Of tokens with one name, the chosen one or else the most probable has it; the others are named
    by their ids, as vLLM writes them (`token_id:5`).
    """
    owners: dict[str, int] = {}
    for token in (chosen, *(token for token, _ in top)):
        owners.setdefault(token_name(tokenizer, token), token)
    names = {token: name for name, token in owners.items()}
    return {names.get(token, f"token_id:{token}"): max(x, FLOOR) for token, x in top}
