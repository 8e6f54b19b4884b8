"""Text of one sample, from its tokens, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.tokenizers.tokenizer import Tokenizer


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
        kept = 0 if is_end else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text with which a stop string begins.

    >>> _overlap("ab<", "<|"), _overlap("abc", "<|")
    (1, 0)
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
