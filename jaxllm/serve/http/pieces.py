"""The choices of an answer: their text piece by piece, from the tokens of the engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

from jaxllm.serve.async_engine import GenerationStream
from jaxllm.serve.live_run import Chunk, TokenLogprob
from jaxllm.tokenizers.tokenizer import Tokenizer

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class SampleText:
    """Decodes the tokens of a sample one by one, and ends the text before a stop string.

    Text that may be the beginning of a stop string is held back until it is known. A stop string
    is looked for in the new text alone, not in the prompt.

    Attributes:
        stopped: a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder(skip_special_tokens=True)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """The text that has become final with a token."""
        return self._release(self._decoder.put(token), is_end=False)

    def end(self) -> str:
        """The rest of the text."""
        return "" if self.stopped else self._release(self._decoder.end(), is_end=True)

    def _release(self, text: str, *, is_end: bool) -> str:
        text = self._held + text
        # The one that is complete first ends the text, however the text was cut into tokens.
        matches = [(i + len(stop), i) for stop in self._stops if (i := text.find(stop)) >= 0]
        if matches:
            self._held, self.stopped = "", True
            return text[: min(matches)[1]]
        kept = 0 if is_end else max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins.

    >>> overlap("ab<", "<|"), overlap("abc", "<|")
    (1, 0)
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """New text of one choice."""

    index: int
    """Number of the choice."""
    text: str
    """Text that has become final; it may lag behind the tokens."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    """One for each token, if they were asked for."""
    finish_reason: str | None
    """In the last piece of a choice: "stop" or "length"."""


@dataclasses.dataclass
class Choice:
    """A whole choice, collected from its pieces."""

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, if they are reported."""
        return sum(logprob.logprob for logprob in self.logprobs) / max(len(self.logprobs), 1)

    def add(self, piece: Piece) -> None:
        """Adds the next piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs or ()
        self.finish_reason = piece.finish_reason


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
            text += sample.put(chunk.tokens[used])
            used += 1
        reason = _FINISH_REASONS[chunk.finish_reason] if chunk.finish_reason else None
        if reason is not None:
            text += sample.end()
        if sample.stopped:
            reason = "stop"
            stream.cancel(chunk.sample)
        logprobs = None if chunk.logprobs is None else chunk.logprobs[:used]
        index = number * stream.row.samples + chunk.sample
        yield Piece(index, text, chunk.tokens[:used], logprobs, reason)


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


async def collect(pieces: AsyncIterator[Piece], count: int) -> list[Choice]:
    """All choices, when the last one has ended."""
    choices = [Choice() for _ in range(count)]
    async for piece in pieces:
        choices[piece.index].add(piece)
    return choices
