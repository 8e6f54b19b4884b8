"""Decodes sentencepiece pieces to text, as transformers 4.57's slow tokenizers do.

Three layers, from outer to inner: added tokens are joined to the surrounding text with spaces;
special tokens split the text into chunks; each chunk is decoded as by sentencepiece's ``Decode``.
Encoding, in ``tokenizers.py``, shares no code with this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxllm.tokenizers.stream_decoder import Stage

SPACE = "▁"


@dataclass(frozen=True)
class DecodeRules:
    """Decoding options of a tokenizer.

    Attributes:
        texts: text of each token inside a chunk, except for special and added tokens and bytes
            that are no ASCII: most of a text, which is decoded in long runs.
        fixed_text: maps a piece whose ``▁`` is not a space to its text: "" for a control piece,
            the piece itself if it is not in the vocabulary; None for all other pieces.
        is_byte: True for byte tokens.
        strip_chunk_start: remove a chunk's leading space.
        strip_all_chunk_starts: remove all leading spaces of a chunk.
        special: special tokens.
        separate: added tokens that are joined to the surrounding text with spaces.
        add_prefix_space: remove the first piece's ``▁``, which encoding added.
        space_before_chunk: "never", "always", or "inner": not if the text begins with a special
            token. The space precedes the chunk that a special token *ends*, so the chunk is held
            back until that token.
        space_after_first_special: put a space after a special token at the start.
        strip_text: strip white space around the text between separate tokens.
    """

    texts: Mapping[str, str]
    fixed_text: Callable[[str], str | None]
    is_byte: Callable[[str], bool]
    strip_chunk_start: bool
    strip_all_chunk_starts: bool
    special: frozenset[str]
    separate: frozenset[str]
    add_prefix_space: bool
    space_before_chunk: str
    space_after_first_special: bool
    strip_text: bool


class PiecesToText(Stage):
    """``PreTrainedTokenizer._decode`` with ``spaces_between_special_tokens``, incrementally."""

    def __init__(self, rules: DecodeRules, skip_special_tokens: bool) -> None:
        self._rules = rules
        self._skip = skip_special_tokens
        self._run: _Run | None = None
        self._has_text = False  # True if there is text before the current run
        self._run_has_text = False  # True if the current run has text

    def put(self, tokens: list[str]) -> list[str]:
        result = []
        for token in tokens:
            if token in self._rules.separate:
                result += [self._end_run(), f" {token}" if self._has_text else token]
                self._has_text = True
            else:
                if self._run is None:
                    self._run = _Run(self._rules, hold_chunks=not self._skip)
                    self._run_has_text = False
                result.append(self._joined(self._run.put(token)))
        return result

    @property
    def is_inside_text(self) -> bool:
        """True if tokens of `DecodeRules.texts` that come next are decoded each by itself."""
        return self._run is not None and self._run.is_inside_text

    def put_text(self, text: str, count: int) -> str:
        """Adds the text of several such tokens."""
        assert self._run is not None
        return self._joined(self._run.put_text(text, count))

    def end(self) -> list[str]:
        if self._run is None:
            return []
        text = self._joined(self._run.end())
        # An empty last run is still joined with a space.
        return [text if self._run_has_text or not self._has_text else " "]

    def token_text(self, token: str) -> str | bytes:
        rules = self._rules
        if token in rules.special or token in rules.separate:
            return token
        if rules.is_byte(token):
            return bytes.fromhex(token[3:5])
        text = rules.fixed_text(token)
        return token.replace(SPACE, " ") if text is None else text

    def _end_run(self) -> str:
        if self._run is None:
            return ""
        text = self._joined(self._run.end())
        self._has_text = self._has_text or self._run_has_text
        self._run = None
        return text

    def _joined(self, text: str) -> str:
        if not text or self._run_has_text:
            return text
        self._run_has_text = True
        return f" {text}" if self._has_text else text


class _Run:
    """``convert_tokens_to_string`` for pieces and special tokens between two separate tokens."""

    def __init__(self, rules: DecodeRules, hold_chunks: bool) -> None:
        self._rules = rules
        self._hold_chunks = hold_chunks and rules.space_before_chunk != "never"
        self._count = 0
        self._after_special = False
        self._chunk = _Chunk(rules)
        self._pending: list[str] = []
        self._started = False
        self._trailing = ""

    def put(self, token: str) -> str:
        return self._strip(self._put(token))

    @property
    def is_inside_text(self) -> bool:
        """True if the next tokens are decoded independently of those before them."""
        return self._count > 1 and not self._after_special and self._chunk.is_inside_text

    def put_text(self, text: str, count: int) -> str:
        """Adds the text of several tokens of `DecodeRules.texts`; see `is_inside_text`."""
        self._count += count
        return self._strip(self._held(text))

    def end(self) -> str:
        return self._strip("".join(self._pending) + self._chunk.end())

    def _put(self, token: str) -> str:
        rules = self._rules
        index, self._count = self._count, self._count + 1
        if index == 0 and rules.add_prefix_space and token.startswith(SPACE):
            token = token[1:]
        if token in rules.special:
            spaced = rules.space_before_chunk == "always" or (
                rules.space_before_chunk == "inner" and index != 0
            )
            leading_space = " " if spaced and not self._after_special else ""
            text = leading_space + "".join(self._pending) + self._chunk.end() + token
            self._pending, self._chunk, self._after_special = [], _Chunk(rules), True
            return text
        leading_space = ""
        if self._after_special and index == 1 and rules.space_after_first_special:
            leading_space = "" if token.startswith(SPACE) else " "
        self._after_special = False
        return leading_space + self._held(self._chunk.put(token))

    def _held(self, text: str) -> str:
        """The text, or nothing if the chunk is held back until it ends."""
        if not self._hold_chunks:
            return text
        self._pending.append(text)
        return ""

    def _strip(self, text: str) -> str:
        """Drops leading white space; holds back trailing white space until text follows."""
        if not self._rules.strip_text:
            return text
        text = self._trailing + text
        if not self._started:
            text = text.lstrip()
            self._started = text != ""
        kept = text.rstrip()
        self._trailing = text[len(kept) :]
        return kept


class _Chunk:
    """sentencepiece's ``Decode`` of pieces without special tokens."""

    def __init__(self, rules: DecodeRules) -> None:
        self._rules = rules
        self._at_start = rules.strip_chunk_start
        self._bytes = bytearray()

    @property
    def is_inside_text(self) -> bool:
        return not self._at_start and not self._bytes

    def put(self, piece: str) -> str:
        if self._rules.is_byte(piece):
            self._bytes.append(int(piece[3:5], 16))
            text = self._characters(final=False)
        else:
            before = self._characters(final=True)
            self._at_start = self._at_start and not before
            text = before + self._piece(piece)
        self._at_start = self._at_start and not text
        return text

    def end(self) -> str:
        return self._characters(final=True)

    def _piece(self, piece: str) -> str:
        text = self._rules.fixed_text(piece)
        if text is not None:
            return text
        if self._at_start and piece.startswith(SPACE):
            piece = piece[1:]
            self._at_start = self._rules.strip_all_chunk_starts
        return piece.replace(SPACE, " ")

    def _characters(self, final: bool) -> str:
        """Decodes complete characters from the bytes; an invalid byte becomes U+FFFD."""
        result = []
        while self._bytes:
            size = _utf8_length(self._bytes[0])
            if size > len(self._bytes) and not final:
                break
            try:
                result.append(self._bytes[:size].decode("utf-8"))
                del self._bytes[:size]
            except UnicodeDecodeError:
                result.append("\ufffd")
                del self._bytes[:1]
        return "".join(result)


def _utf8_length(first: int) -> int:
    """Length of a UTF-8 character, from its first byte."""
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2 if first >= 0xC0 else 1
