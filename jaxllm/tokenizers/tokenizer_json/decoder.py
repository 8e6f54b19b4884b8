"""Decoding stages for the ``decoder`` of a tokenizer.json, as in the tokenizers library."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any

from jaxllm.common.errors import UnsupportedError
from jaxllm.tokenizers.stream_decoder import Stage

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def decoder_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    """Makes the stages for the ``decoder`` of a checked tokenizer.json.

    Raises:
        UnsupportedError: a combination that cannot be streamed; no known model has one.
    """
    if decoder is None:
        return [JoinWithSpaces()]
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[Stage] = []
    fused = False
    for step in steps:
        step_type = step["type"]
        if fused and step_type not in ("Fuse", "Strip"):
            raise UnsupportedError(
                f"tokenizer.json: decoder: {step_type} after the tokens were fused"
            )
        match step_type:
            case "ByteLevel":
                stages.append(ByteLevel())
                fused = True
            case "Metaspace":
                scheme = step.get("prepend_scheme", "always")
                stages.append(Metaspace(step["replacement"], scheme != "never"))
            case "Replace":
                stages.append(Replace(step["pattern"]["String"], step["content"]))
            case "ByteFallback":
                stages.append(ByteFallback())
            case "Fuse":
                fused = True
            case "Strip" if not fused:
                stages.append(Strip(step["content"], step["start"], step["stop"]))
            case "Strip" if step["stop"] == 0:
                stages.append(StripTextStart(step["content"], step["start"]))
            case _:
                raise UnsupportedError(f"tokenizer.json: decoder: {step} is not supported")
    return stages


def byte_to_unicode() -> dict[int, str]:
    """GPT-2's mapping of bytes to printable characters.

    >>> byte_to_unicode()[ord(" ")], byte_to_unicode()[ord("a")]
    ('Ġ', 'a')
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(printable))
    return table


_UNICODE_TO_BYTE = {character: byte for byte, character in byte_to_unicode().items()}


class ByteLevel(Stage):
    """Decodes GPT-2's byte alphabet; a token with any other character is plain text."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def put(self, tokens: list[str]) -> list[str]:
        return [self._utf8.decode(self._bytes(token)) for token in tokens]

    def end(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]

    def token_text(self, token: str) -> bytes:
        return self._bytes(token)

    @staticmethod
    def _bytes(token: str) -> bytes:
        try:
            return bytes(_UNICODE_TO_BYTE[character] for character in token)
        except KeyError:
            return token.encode("utf-8")


class Metaspace(Stage):
    """Replaces ``▁`` with a space, or with nothing in the first token if the encoder added it."""

    def __init__(self, replacement: str, drop_first: bool) -> None:
        self._replacement = replacement
        self._drop = drop_first

    def put(self, tokens: list[str]) -> list[str]:
        result = []
        for token in tokens:
            result.append(token.replace(self._replacement, "" if self._drop else " "))
            self._drop = False
        return result

    def token_text(self, token: str) -> str:
        return token.replace(self._replacement, " ")


class Replace(Stage):
    """Replaces a string in each token."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def put(self, tokens: list[str]) -> list[str]:
        return [token.replace(self._pattern, self._content) for token in tokens]

    def token_text(self, token: str) -> str:
        return token.replace(self._pattern, self._content)


class ByteFallback(Stage):
    """Decodes runs of ``<0xHH>`` tokens as UTF-8; an invalid run becomes one U+FFFD per byte.

    As in the tokenizers library, one invalid byte makes the whole run invalid, so a run is held
    back to its end.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def put(self, tokens: list[str]) -> list[str]:
        result = []
        for token in tokens:
            match = _BYTE_TOKEN.fullmatch(token)
            if match:
                self._run.append(int(match[1], 16))
            else:
                result += [*self.end(), token]
        return result

    def end(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode("utf-8")] if run else []
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)

    def token_text(self, token: str) -> str | bytes:
        return bytes.fromhex(token[3:5]) if _BYTE_TOKEN.fullmatch(token) else token


class Strip(Stage):
    """Strips up to ``start`` and ``stop`` copies of a character around each token."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop

    def put(self, tokens: list[str]) -> list[str]:
        return [self._strip(token) for token in tokens]

    def token_text(self, token: str) -> str:
        return self._strip(token)

    def _strip(self, token: str) -> str:
        left = 0
        while left < min(self._start, len(token)) and token[left] == self._content:
            left += 1
        right = len(token)
        while right > max(left, len(token) - self._stop) and token[right - 1] == self._content:
            right -= 1
        return token[left:right]


class StripTextStart(Stage):
    """Strips up to ``count`` copies of a character at the start of the text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def put(self, tokens: list[str]) -> list[str]:
        text = "".join(tokens)
        start = 0
        while self._left and start < len(text) and text[start] == self._content:
            start += 1
            self._left -= 1
        if start < len(text):
            self._left = 0
        return [text[start:]]


class JoinWithSpaces(Stage):
    """Joins tokens with spaces; used for a tokenizer.json without a decoder."""

    def __init__(self) -> None:
        self._first = True

    def put(self, tokens: list[str]) -> list[str]:
        result = []
        for token in tokens:
            result.append(token if self._first else f" {token}")
            self._first = False
        return result

    def token_text(self, token: str) -> str:
        return f" {token}"
