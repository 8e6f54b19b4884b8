"""Decodes token ids to text, incrementally.

A chain of stages transforms token strings. Each stage holds back text that a later token can
change: an unfinished UTF-8 character, a run of byte tokens, a space before a full stop. ``decode``
runs the same chain to its end, so that streamed pieces concatenate to its result. The cost per
token does not grow with the text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError, UnsupportedError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Stage:
    """One decoding stage; it may hold strings back until ``end``."""

    def put(self, tokens: list[str]) -> list[str]:
        raise NotImplementedError

    def end(self) -> list[str]:
        return []

    def inside(self, token: str) -> str | bytes:
        """Text of a token inside a sequence, independent of its neighbours.

        A bytes result, possibly part of a character, is final: no further stage runs on it.
        """
        return token


class StreamDecoder:
    """Decodes ids incrementally.

    ``"".join([put(ids) for ids in ...] + [end()])`` is ``decode(all ids)``, and no piece ends
    inside a character.
    """

    def __init__(self, id_to_token: Callable[[int], str | None], stages: Sequence[Stage]) -> None:
        self._id_to_token = id_to_token
        self._stages = stages

    def put(self, ids: int | Iterable[int]) -> str:
        """Adds one or more ids; returns the text that has become final, possibly ``""``."""
        tokens = []
        for index in (ids,) if isinstance(ids, int | np.integer) else ids:
            if index < 0:
                raise InputError(f"token id {int(index)} is negative and cannot be decoded")
            token = self._id_to_token(int(index))
            if token is not None:
                tokens.append(token)
        for stage in self._stages:
            tokens = stage.put(tokens)
        return "".join(tokens)

    def end(self) -> str:
        """Returns the remaining text. The decoder must not be used afterwards."""
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.put(tokens) + stage.end()
        return "".join(tokens)


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

    def inside(self, token: str) -> bytes:
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

    def inside(self, token: str) -> str:
        return token.replace(self._replacement, " ")


class Replace(Stage):
    """Replaces a string in each token."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content

    def put(self, tokens: list[str]) -> list[str]:
        return [token.replace(self._pattern, self._content) for token in tokens]

    def inside(self, token: str) -> str:
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
            match = BYTE_TOKEN.fullmatch(token)
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

    def inside(self, token: str) -> str | bytes:
        return bytes.fromhex(token[3:5]) if BYTE_TOKEN.fullmatch(token) else token


class Strip(Stage):
    """Strips up to ``start`` and ``stop`` copies of a character around each token."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop

    def put(self, tokens: list[str]) -> list[str]:
        return [self._strip(token) for token in tokens]

    def inside(self, token: str) -> str:
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

    def inside(self, token: str) -> str:
        return f" {token}"


class CleanUp(Stage):
    """transformers' ``clean_up_tokenization_spaces``: no space before punctuation.

    Inside a pattern one of the last three characters is always a space, and replacements only
    remove spaces. So text can be cut after three characters that are not spaces.
    """

    _PATTERNS = (
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    )
    _LAST_CUT = re.compile(r".*[^ ]{3}", re.DOTALL)

    def __init__(self) -> None:
        self._held = ""

    def put(self, tokens: list[str]) -> list[str]:
        text = self._held + "".join(tokens)
        match = self._LAST_CUT.match(text)
        cut = match.end() if match else 0
        self._held = text[cut:]
        return [self._clean(text[:cut])]

    def end(self) -> list[str]:
        return [self._clean(self._held)]

    def _clean(self, text: str) -> str:
        for pattern, replacement in self._PATTERNS:
            text = text.replace(pattern, replacement)
        return text


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
        kind = step["type"]
        if fused and kind not in ("Fuse", "Strip"):
            raise UnsupportedError(f"tokenizer.json: decoder: {kind} after the tokens were fused")
        match kind:
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
