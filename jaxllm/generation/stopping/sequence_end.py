"""The end of one sequence, looked for on the host: an EOS token or a stop string."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jaxllm.tokenizers.tokenizer import Tokenizer


class StopStringMatcher:
    """Finds the token that completes a stop string, by the rule of `StopStringCriteria`.

    The string ends within or at the end of the newest token, and may begin in any earlier one, the
    prompt included. A token counts as its bytes in the middle of a text; an id without a token ends
    every partial match.

    Args:
        prompt: token ids before the first new token.
    """

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Iterable[int] = ()
    ) -> None:
        self._bytes = tokenizer.token_bytes()
        self._patterns = [string.encode("utf-8") for string in strings]
        self._kept = max(map(len, self._patterns)) - 1
        self._tail = b""
        for token in prompt:
            self._extend(token)

    def completes(self, token: int) -> bool:
        """Adds a new token; True if it completes a stop string."""
        before = self._tail
        text = self._extend(token)
        return any(text.find(p, max(len(before) - len(p) + 1, 0)) >= 0 for p in self._patterns)

    def _extend(self, token: int) -> bytes:
        """The end of the text, the token included; keeps what may be the start of a match."""
        content = self._bytes[token] if token < len(self._bytes) else None
        if content is None:
            self._tail = b""
            return b""
        text = self._tail + content
        self._tail = text[max(len(text) - self._kept, 0) :]
        return text


def stop_string_matcher(
    tokenizer: Tokenizer | None, strings: Sequence[str] | None, prompt: Iterable[int]
) -> StopStringMatcher | None:
    """A matcher of these stop strings after a prompt; None without any."""
    return StopStringMatcher(tokenizer, strings, prompt) if tokenizer and strings else None


def sequence_end(
    tokens: Iterable[int], eos: Collection[int], stops: StopStringMatcher | None
) -> tuple[int, str] | None:
    """The number of tokens up to and including the sequence's end, and what it ends with: "eos" or
    "stop". None if it does not end within these new tokens.

    What follows may be padding, which no token tells: a pad may be an EOS token or any other.

    >>> sequence_end([5, 2, 2], {2}, None), sequence_end([5, 6], {2}, None)
    ((2, 'eos'), None)
    """
    for count, token in enumerate(tokens, start=1):
        completes = stops is not None and stops.completes(token)
        if token in eos:
            return count, "eos"
        if completes:
            return count, "stop"
    return None
