"""Decodes token ids to text, incrementally.

A chain of stages transforms token strings. Each stage holds back text that a later token can
change: an unfinished UTF-8 character, a run of byte tokens, a space before a full stop. ``decode``
runs the same chain to its end, so that streamed pieces concatenate to its result. The cost per
token does not grow with the text.

The stages for the ``decoder`` of a tokenizer.json are here too; the stage for sentencepiece models
is in ``sentencepiece_model.py``.
"""

from __future__ import annotations

import codecs
import copy
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError, UnsupportedError

MAX_IDS = 2**24
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Stage:
    """One decoding stage; it may hold strings back until ``end``."""

    def put(self, tokens: Sequence[str]) -> list[str]:
        raise NotImplementedError

    def end(self) -> list[str]:
        return []

    def token_text(self, token: str) -> str | bytes:
        """Text of a token inside a sequence, independent of its neighbours.

        A bytes result, possibly part of a character, is final: no further stage runs on it.
        """
        return token


class TokenTable:
    """The token of each id, as the first stage gets it; None for an id that is skipped."""

    def __init__(self, tokens: Sequence[str | None]) -> None:
        self._tokens = tokens
        self._has_gaps = None in tokens

    def look_up(self, ids: Sequence[int]) -> Sequence[str]:
        """The tokens of ids, without those that have none."""
        table, size = self._tokens, len(self._tokens)
        try:
            # Twice as fast as a loop; with one id, its result is no tuple.
            found: Any = operator.itemgetter(*ids)(table) if len(ids) > 1 else [table[ids[0]]]
        except IndexError:  # beyond the table, or no ids
            found = [table[index] for index in ids if index < size]
        return [token for token in found if token is not None] if self._has_gaps else found


class StreamDecoder:
    """Decodes ids incrementally.

    ``"".join([put(ids) for ids in ...] + [end()])`` is ``decode(all ids)``, and no piece ends
    inside a character.
    """

    def __init__(self, table: TokenTable, stages: Sequence[Stage]) -> None:
        self._table = table
        self._stages = stages

    def put(self, ids: int | Iterable[int]) -> str:
        """Adds one or more ids; returns the text that has become final, possibly ``""``."""
        return self.put_checked(id_list(ids))

    def put_checked(self, ids: list[int]) -> str:
        """Adds ids of `id_list`."""
        tokens = self._table.look_up(ids)
        for stage in self._stages:
            tokens = stage.put(tokens)
        return "".join(tokens)

    def pending(self) -> str:
        """The text that `end` would return now. Unlike after `end`, ids may follow."""
        return StreamDecoder(self._table, copy.deepcopy(self._stages)).end()

    def end(self) -> str:
        """Returns the remaining text. The decoder must not be used afterwards."""
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.put(tokens) + stage.end()
        return "".join(tokens)


def id_list(ids: Any) -> list[int]:
    """The ids of `iterate_ids` as a list; a list of ints is checked as a whole."""
    is_array = isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu"
    values: Any = ids.tolist() if is_array and len(ids) <= MAX_IDS else ids
    is_list = type(values) is list and len(values) <= MAX_IDS
    is_plain = is_list and (is_array or operator.countOf(map(type, values), int) == len(values))
    return values if is_plain and min(values, default=0) >= 0 else list(iterate_ids(ids))


def iterate_ids(ids: Any) -> Iterator[int]:
    """Yields one id, or those of a list, one-dimensional array or other iterable."""
    if is_id(ids):
        ids = (ids,)
    elif isinstance(ids, str | bytes | Mapping) or not hasattr(ids, "__iter__"):
        raise InputError(f"token ids: expected an int or a list of ints, found {_describe(ids)}")
    elif getattr(ids, "ndim", 1) != 1:
        raise InputError(
            f"token ids: an array of shape {ids.shape}: expected one dimension (decode row by row)"
        )
    elif hasattr(ids, "__len__") and len(ids) > MAX_IDS:
        raise InputError(f"token ids: {len(ids)} at once, but at most {MAX_IDS} are taken")
    for index in ids:
        if not is_id(index):
            raise InputError(f"token ids: expected ints, found {_describe(index)}")
        index = operator.index(index)
        if index < 0:
            raise InputError(f"token id {index} is negative and cannot be decoded")
        yield index


def is_id(value: Any) -> bool:
    """True for ints and integer scalars of NumPy and JAX."""
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _describe(value: object) -> str:
    return f"{type(value).__name__} ({str(value)[:40]})"


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
    _SAFE_SPLIT = re.compile(r".*[^ ]{3}", re.DOTALL)

    def __init__(self) -> None:
        self._pending = ""

    def put(self, tokens: Sequence[str]) -> list[str]:
        text = self._pending + "".join(tokens)
        match = self._SAFE_SPLIT.match(text)
        split = match.end() if match else 0
        self._pending = text[split:]
        return [self.clean(text[:split])]

    def end(self) -> list[str]:
        return [self.clean(self._pending)]

    @classmethod
    def clean(cls, text: str) -> str:
        """The whole text without these spaces."""
        for pattern, replacement in cls._PATTERNS:
            text = text.replace(pattern, replacement)
        return text


def decoder_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    """Makes the stages for the ``decoder`` of a checked tokenizer.json.

    Raises:
        UnsupportedError: a combination that cannot be streamed; no known model has one.
    """
    if decoder is None:
        return [EachToken(" {}".format, str)]
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
                stages.append(Utf8(byte_level, "replace"))
                fused = True
            case "Metaspace":
                space = step["replacement"]
                # The encoder put one before the first token.
                first = " " if step.get("prepend_scheme") == "never" else ""
                stages.append(
                    EachToken(
                        methodcaller("replace", space, " "), methodcaller("replace", space, first)
                    )
                )
            case "Replace":
                stages.append(
                    EachToken(methodcaller("replace", step["pattern"]["String"], step["content"]))
                )
            case "ByteFallback":
                stages.append(ByteFallback())
            case "Fuse":
                fused = True
            case "Strip" if not fused:
                stages.append(
                    EachToken(partial(strip_copies, step["content"], step["start"], step["stop"]))
                )
            case "Strip" if step["stop"] == 0:
                stages.append(StripTextStart(step["content"], step["start"]))
            case _:
                raise UnsupportedError(f"tokenizer.json: decoder: {step} is not supported")
    return stages


class EachToken(Stage):
    """Changes each token by itself, the first one perhaps in another way."""

    def __init__(
        self, change: Callable[[str], str], change_first: Callable[[str], str] | None = None
    ) -> None:
        self._change, self._change_first = change, change_first

    def put(self, tokens: Sequence[str]) -> list[str]:
        result = list(map(self._change, tokens))
        if tokens and self._change_first is not None:
            result[0], self._change_first = self._change_first(tokens[0]), None
        return result

    def token_text(self, token: str) -> str:
        return self._change(token)


def strip_copies(character: str, start: int, stop: int, token: str) -> str:
    """Strips up to ``start`` and ``stop`` copies of a character around a token.

    >>> strip_copies("_", 1, 2, "__a___")
    '_a_'
    """
    left = 0
    while left < min(start, len(token)) and token[left] == character:
        left += 1
    right = len(token)
    while right > max(left, len(token) - stop) and token[right - 1] == character:
        right -= 1
    return token[left:right]


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


class Utf8(Stage):
    """Decodes the bytes of tokens, of which a character may have several.

    Args:
        bytes_of: the bytes of a token.
        errors: what becomes of invalid UTF-8, as for `bytes.decode`.
    """

    def __init__(self, bytes_of: Callable[[str], bytes], errors: str) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def put(self, tokens: Sequence[str]) -> list[str]:
        return [self._utf8.decode(self._bytes_of(token)) for token in tokens]

    def end(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]

    def token_text(self, token: str) -> bytes:
        return self._bytes_of(token)


def byte_level(token: str) -> bytes:
    """The bytes of a token in GPT-2's alphabet; one with any other character is plain text."""
    try:
        return bytes(_UNICODE_TO_BYTE[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


class ByteFallback(Stage):
    """Decodes runs of ``<0xHH>`` tokens as UTF-8; an invalid run becomes one U+FFFD per byte.

    As in the tokenizers library, one invalid byte makes the whole run invalid, so a run is held
    back to its end.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def put(self, tokens: Sequence[str]) -> list[str]:
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


class StripTextStart(Stage):
    """Strips up to ``count`` copies of a character at the start of the text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def put(self, tokens: Sequence[str]) -> list[str]:
        text = "".join(tokens)
        stripped = strip_copies(self._content, self._left, 0, text)
        self._left = 0 if stripped else self._left - len(text)
        return [stripped]
