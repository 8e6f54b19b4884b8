"""The choices of an answer, piece by piece, from the chunks of the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence

from jaxllm.serve.async_engine import GenerationStream
from jaxllm.serve.chunks import TokenLogprob
from jaxllm.serve.http.sample_text import SampleText
from jaxllm.tokenizers.tokenizer import Tokenizer

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


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
    for number, stream in enumerate(streams):
        count = stream.row.samples
        samples = [SampleText(tokenizer, stops) for _ in range(count)]
        async for chunk in stream:
            sample, text, used = samples[chunk.sample], "", 0
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
            index = number * count + chunk.sample
            yield Piece(index, text, chunk.tokens[:used], logprobs, reason)


async def collect(pieces: AsyncIterator[Piece], count: int) -> list[Choice]:
    """All choices, when the last one has ended."""
    choices = [Choice() for _ in range(count)]
    async for piece in pieces:
        choices[piece.index].add(piece)
    return choices
