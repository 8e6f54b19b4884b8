"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from jaxllm.serve.async_engine import GenerationStream
from jaxllm.serve.http.answers import Answer, Usage
from jaxllm.serve.http.api_types import ChatRequest
from jaxllm.serve.http.logprobs_json import chat_logprobs
from jaxllm.serve.http.pieces import Choice, Piece
from jaxllm.serve.http.state import ServerState
from jaxllm.serve.http.tool_calls import (
    START,
    split_tool_calls,
    template_messages,
    tool_names,
)


class ChatAnswer(Answer):
    """The answer to messages."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    request: ChatRequest

    def __init__(self, state: ServerState, request: ChatRequest, usage: Usage) -> None:
        super().__init__(state, request, usage)
        has_tools = request.tools is not None and request.tool_choice != "none"
        self._tools = tool_names(request.tools or ()) if has_tools else []
        self._held: dict[int, str] = {}
        if request.max_completion_tokens is not None:
            self.limit_field = "max_completion_tokens"

    async def start(self) -> list[GenerationStream]:
        """Renders the messages and queues them."""
        request = self.request
        ids = await self.state.in_thread(chat_ids, self.state, request, bool(self._tools))
        limit = request.max_completion_tokens or request.max_tokens
        return await self.submit([ids], limit, logprobs=request.logprobs)

    def choice(self, choice: Choice) -> dict[str, Any]:
        content, calls = split_tool_calls(choice.text, self._tools)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        message["refusal"] = None
        reason = choice.finish_reason
        if calls:
            message["tool_calls"] = [call.to_json() for call in calls]
            reason = "tool_calls"
        else:
            message["content"] = content
        logprobs = None
        if self.request.logprobs:
            logprobs = chat_logprobs(
                self.tokenizer, choice.tokens, choice.logprobs, self.request.top_logprobs
            )
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}

    def first_choices(self, count: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in range(count)
        ]

    def piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        delta, reason = self._delta(piece)
        logprobs = None
        if piece.logprobs is not None:
            logprobs = chat_logprobs(
                self.tokenizer, piece.tokens, piece.logprobs, self.request.top_logprobs
            )
        if not delta and reason is None and logprobs is None:
            return []  # the text waits for the next token
        return [{"delta": delta, "logprobs": logprobs, "finish_reason": reason}]

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
                text, calls = split_tool_calls(text, self._tools)
                if calls:
                    deltas = [{"index": i, **call.to_json()} for i, call in enumerate(calls)]
                    content = {"content": text} if text else {}
                    return {**content, "tool_calls": deltas}, "tool_calls"
        return ({"content": text} if text else {}), reason


def _possible_call(text: str) -> int:
    """Start of a tool call or of a possible one; the length of the text if there is none.

    >>> _possible_call("Well, <tool_c"), _possible_call(' {"name"'), _possible_call("no")
    (6, 0, 2)
    """
    if text.lstrip().startswith("{"):
        return 0
    start = text.find(START)
    if start >= 0:
        return start
    for length in range(min(len(START) - 1, len(text)), 0, -1):
        if text.endswith(START[:length]):
            return len(text) - length
    return len(text)


def chat_ids(state: ServerState, request: Any, with_tools: bool) -> list[int]:
    """The token ids of messages in the model's chat template.

    Args:
        request: has `messages`, and perhaps `tools` and `chat_template_kwargs`.
    """
    options = dict(getattr(request, "chat_template_kwargs", None) or {})
    if with_tools:
        options["tools"] = list(request.tools)
    ids = state.tokenize(
        "apply_chat_template",
        template_messages(request.messages),
        max_bytes=state.limits.body_bytes,
        **options,
    )
    assert isinstance(ids, list)
    return ids
