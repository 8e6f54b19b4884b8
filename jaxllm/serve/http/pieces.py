"""The choices of an answer: their text piece by piece, and the tool calls in it.

The tokens come from the engine. Tool calls are recognised in the two forms that chat templates of
the supported families ask for: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>`` (Hermes,
Qwen, SmolLM), any number of them, and a text that is nothing but ``{"name": ..., "parameters":
...}`` (Llama 3).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import uuid
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from jaxllm.batch.rows import Chunk, TokenLogprob
from jaxllm.common.errors import InputError
from jaxllm.serve.async_engine import GenerationStream
from jaxllm.tokenizers.tokenizer import Tokenizer

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
START = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class SampleText:
    """Decodes the tokens of a sample one by one, and ends the text before a stop string.

    The `stop` of a request is looked for here alone: the engine's `stop_strings` leave the stop
    string in the text. Text that may be the beginning of a stop string is held back until it is
    known. A stop string is looked for in the new text alone, not in the prompt. Special tokens are
    not in the text, but a stop string may be one or contain one.

    Attributes:
        stopped: a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._decoder = tokenizer.stream_decoder(skip_special_tokens=True)
        self._decoded = ""
        self._returned = 0  # characters of `_decoded`
        self._specials: list[tuple[int, str]] = []  # each with the characters before it
        self._unplaced: deque[tuple[int, str]] = deque()
        self.stopped = False

    def put(self, token: int, *, place: bool = False) -> str:
        """The text that has become final with a token.

        Args:
            place: `offsets` returns the place of this token.
        """
        if place:
            self._unplaced.append((len(self._decoded), self._decoder.pending()))
        self._decoded += self._decoder.put(token)
        if self._stops and token in self._tokenizer.special_ids:
            # The text before it may wait for more, but a stop string that it completes does not.
            pending = self._decoder.pending()
            content = self._tokenizer.id_to_token(token) or ""
            self._specials.append((len(self._decoded) + len(pending), content))
            if self._match("".join(x for x, _ in self._unreturned(pending))) is not None:
                self._decoded += pending
        return self._release(is_end=False)

    def end(self) -> str:
        """The rest of the text."""
        if self.stopped:
            return ""
        self._decoded += self._decoder.end()
        return self._release(is_end=True)

    def offsets(self, *, is_end: bool) -> list[int]:
        """Characters of the returned text before each token of which that is known now.

        It is known later for a token after the first bytes of a character, or after text that is
        held back. The parts of a character have the place of the character.
        """
        result: list[int] = []
        while self._unplaced:
            count, pending = self._unplaced[0]
            following = self._decoded[count : count + len(pending)]
            pairs = zip(pending, following, strict=False)
            place = count + len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
            if not is_end and (len(following) < len(pending) or place > self._returned):
                break
            result.append(min(place, self._returned))
            self._unplaced.popleft()
        return result

    def _unreturned(self, pending: str = "") -> list[tuple[str, tuple[int, str] | None]]:
        """Characters that are not returned yet, special tokens included, each with its special
        token; None in the text."""
        text, last = self._decoded[self._returned :] + pending, 0
        result: list[tuple[str, tuple[int, str] | None]] = []
        for special in self._specials:
            position = max(special[0] - self._returned, 0)
            if position > len(text):
                break
            result += [(x, None) for x in text[last:position]] + [(x, special) for x in special[1]]
            last = position
        return result + [(x, None) for x in text[last:]]

    def _match(self, text: str) -> int | None:
        """Start of the stop string that is complete first, however the text was cut into tokens."""
        matches = [(i + len(stop), i) for stop in self._stops if (i := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _release(self, *, is_end: bool) -> str:
        start, characters = self._returned, self._unreturned()
        text = "".join(x for x, _ in characters)
        end = self._match(text)
        self.stopped = end is not None
        if end is None:
            kept = 0 if is_end else max((overlap(text, stop) for stop in self._stops), default=0)
            end = len(text) - kept
        self._returned += sum(special is None for _, special in characters[:end])
        held = {special for _, special in characters[end:]}
        self._specials = [x for x in self._specials if x in held or x[0] > len(self._decoded)]
        return self._decoded[start : self._returned]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins.

    >>> overlap("ab<", "<|"), overlap("abc", "<|")
    (1, 0)
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of one choice, or all of it."""

    index: int
    """Number of the choice."""
    text: str
    """Text that has become final; it may lag behind the tokens."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    """One for each token, if they were asked for."""
    finish_reason: str | None
    """In the last piece of a choice: "stop" or "length"."""
    offsets: tuple[int, ...] = ()
    """With `logprobs`: characters of the choice's text before each of its next tokens. They may lag
    behind the tokens, like the text."""

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, if they are reported."""
        logprobs = self.logprobs or ()
        return sum(logprob.logprob for logprob in logprobs) / max(len(logprobs), 1)


async def pieces_of(
    streams: Sequence[GenerationStream], tokenizer: Tokenizer, stops: Sequence[str]
) -> AsyncIterator[Piece]:
    """The pieces of all choices: sample i of stream number k is choice k * n + i.

    A sample ends at a stop string, which is not in its text; the engine then frees its slot.
    """
    samples: dict[tuple[int, int], SampleText] = {}
    async for number, chunk in merged(streams):
        stream, key = streams[number], (number, chunk.sample)
        sample = samples.setdefault(key, SampleText(tokenizer, stops))
        text, used = "", 0
        while used < len(chunk.tokens) and not sample.stopped:
            text += sample.put(chunk.tokens[used], place=chunk.logprobs is not None)
            used += 1
        reason = _FINISH_REASONS[chunk.finish_reason] if chunk.finish_reason else None
        if reason is not None:
            text += sample.end()
        if sample.stopped:
            reason = "stop"
            stream.cancel(chunk.sample)
        logprobs = None if chunk.logprobs is None else chunk.logprobs[:used]
        index = number * stream.row.samples + chunk.sample
        offsets = sample.offsets(is_end=reason is not None)
        yield Piece(index, text, chunk.tokens[:used], logprobs, reason, tuple(offsets))


async def merged(streams: Sequence[GenerationStream]) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of some streams as they come, each with the number of its stream."""

    def next_of(number: int) -> asyncio.Future[Chunk | None]:
        return asyncio.ensure_future(anext(streams[number], None))

    pending = {next_of(number): number for number in range(len(streams))}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                number, chunk = pending.pop(future), future.result()
                if chunk is not None:
                    yield number, chunk
                    pending[next_of(number)] = number
    finally:
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def collect(pieces: AsyncIterator[Piece], count: int) -> list[Piece]:
    """All choices, each as one piece, when the last one has ended."""
    parts: list[list[Piece]] = [[] for _ in range(count)]
    async for piece in pieces:
        parts[piece.index].append(piece)
    chain = itertools.chain.from_iterable
    return [
        dataclasses.replace(
            of_choice[-1],
            text="".join(piece.text for piece in of_choice),
            tokens=tuple(chain(piece.tokens for piece in of_choice)),
            logprobs=tuple(chain(piece.logprobs or () for piece in of_choice)),
            offsets=tuple(chain(piece.offsets for piece in of_choice)),
        )
        for of_choice in parts
    ]


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a function."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def to_json(self) -> dict[str, Any]:
        """The call as OpenAI's interface has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def split_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Splits a text into its content and its tool calls.

    What is no valid call of one of the functions `names` stays in the content.

    >>> split_tool_calls('Hm. <tool_call>{"name": "f", "arguments": {}}</tool_call>', ["f"])[0]
    'Hm. '
    """
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _parsed(match[1], names)
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    content = _CALL.sub(take, text)
    if not calls and (call := _parsed(text, names)) is not None:
        return "", [call]
    return (content.rstrip("\n") if calls else content), calls


def _parsed(text: str, names: Collection[str]) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", call["name"], text)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the functions of a request.

    Raises:
        InputError: a tool is no function with a name.
    """
    names = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str):
            raise InputError(f"tools[{number}]: expected a function with a name")
        names.append(name)
    return names
