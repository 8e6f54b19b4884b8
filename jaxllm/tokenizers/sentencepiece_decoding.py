"""Decodes sentencepiece pieces to text, as transformers 4.57's slow tokenizers do.

Three layers, from outer to inner: added tokens are joined to the surrounding text with spaces;
special tokens split the text into chunks; each chunk is decoded as by sentencepiece's ``Decode``.

So that long texts need no work in Python for each token, every token has a *symbol*: its text
inside a chunk, with marks where it is more than text. The symbols of many tokens are joined at
once, and split at the marks. A mark is a character that no token has; a byte that is no ASCII is a
lone surrogate, as for Python's "surrogateescape".
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxllm.tokenizers.sentencepiece_model import SentencePieceModel
from jaxllm.tokenizers.stream_decoder import Stage

SPACE = "▁"
_MARKS = "".join(map(chr, (*range(0x80, 0xA0), *range(0xD800, 0xD804))))
"""Characters of which those that no token has are marks; the first leave a text a byte each."""
_ONE_EACH = "replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Handles an error of decoding: U+FFFD for each invalid byte, as in sentencepiece."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_ONE_EACH, _replace_each_byte)


@dataclass(frozen=True)
class DecodeRules:
    """Decoding options of a tokenizer.

    Attributes:
        model: the model, which has the pieces.
        special: special tokens.
        separate: added tokens that are joined to the surrounding text with spaces.
        add_prefix_space: remove the first piece's ``▁``, which encoding added.
        space_before_chunk: "never", "always", or "inner": not if the text begins with a special
            token. The space precedes the chunk that a special token *ends*, so the chunk is held
            back until that token.
        space_after_first_special: put a space after a special token at the start.
        strip_text: strip white space around the text between separate tokens.
        after_special: text after a special token.
        unknown_has_spaces: ``▁`` is a space in tokens that the model lacks too (Marian's, which are
            of two models).
    """

    model: SentencePieceModel
    special: frozenset[str]
    separate: frozenset[str]
    add_prefix_space: bool
    space_before_chunk: str
    space_after_first_special: bool
    strip_text: bool
    after_special: str = ""
    unknown_has_spaces: bool = False

    @cached_property
    def marks(self) -> tuple[str, str, str, str]:
        """Marks around special and separate tokens, and those of `empty` and `kept`."""
        tokens = (*self.model.pieces, *self.special, *self.separate, self.model.unk_text)
        used = set("".join(tokens))
        special, separate, empty, kept = [mark for mark in _MARKS if mark not in used][:4]
        return special, separate, empty, kept

    @property
    def empty(self) -> str:
        """The mark of a token without text."""
        return self.marks[2]

    def symbol(self, token: str) -> str:
        """The symbol of a token."""
        mark = self.marks[1]
        return f"{mark}{token}{mark}" if token in self.separate else self._inner_symbol(token)

    def _inner_symbol(self, token: str) -> str:
        if token in self.special:
            return f"{self.marks[0]}{token}{self.after_special}{self.marks[0]}"
        if token in self.model.bytes:
            byte = int(token[3:5], 16)
            return chr(0xDC00 + byte) if byte > 127 else self._kept(chr(byte))
        if token in self.model.control:
            return self.empty
        if token == self.model.unk_piece:
            return self._kept(self.model.unk_text) or self.empty
        if token not in self.model.vocabulary:  # left of a piece without its ``▁``
            text = token.replace(SPACE, " ") if self.unknown_has_spaces else token
            return self._kept(text) or self.empty
        text = token.replace(SPACE, " ")
        return f" {self._kept(text[1:])}" if token.startswith(SPACE) else self._kept(text)

    def _kept(self, text: str) -> str:
        """A text with a mark before a space at its start, which is never stripped."""
        return self.marks[3] + text if text.startswith(" ") else text

    @cached_property
    def first_symbols(self) -> Mapping[str, str]:
        """Symbols of tokens with ``▁`` where they come first, by their symbols elsewhere."""
        if not self.add_prefix_space:
            return {}
        fixed = self.model.control | {self.model.unk_piece}
        tokens = self.special | (self.model.vocabulary - self.separate - fixed)
        return {
            self.symbol(token): self._inner_symbol(token[1:])
            for token in tokens
            if token.startswith(SPACE)
        }

    @cached_property
    def ignored_at_start(self) -> str:
        """Marks and spaces after which a chunk is still at its start."""
        return f" {self.empty}" if self.model.flags.remove_extra_whitespaces else self.empty

    @cached_property
    def space_at_start(self) -> str:
        """The space that is removed from the start of a chunk after what is ignored, or nothing."""
        flags = self.model.flags
        return " " if flags.add_dummy_prefix or flags.remove_extra_whitespaces else ""


class SymbolsToText(Stage):
    """``PreTrainedTokenizer._decode`` with ``spaces_between_special_tokens``, incrementally."""

    def __init__(self, rules: DecodeRules, skip_special_tokens: bool) -> None:
        self._rules = rules
        # A special token that is a piece too, with another id, is not skipped. A stream does not
        # wait for it, so its space comes after the chunk then.
        self._hold_chunks = not skip_special_tokens and rules.space_before_chunk != "never"
        self._run: _Run | None = None
        self._has_text = False  # True if there is text before the current run
        self._run_has_text = False  # True if the current run has text

    def put(self, tokens: Sequence[str]) -> list[str]:
        """Adds tokens, by their symbols."""
        text = "".join(tokens)
        if not tokens:
            return []
        mark = self._rules.marks[1]
        if mark not in text:
            if self._run is None:
                self._run = _Run(self._rules, self._hold_chunks)
                self._run_has_text = False
            return [self._joined(self._run.put(text, tokens[0], len(tokens)))]
        result, start = [], 0
        for token in text.split(mark)[1::2]:
            stop = tokens.index(f"{mark}{token}{mark}", start)
            result += [*self.put(tokens[start:stop]), self._end_run()]
            result.append(f" {token}" if self._has_text else token)
            self._has_text, start = True, stop + 1
        return result + self.put(tokens[start:])

    def end(self) -> list[str]:
        if self._run is None:
            return []
        text = self._joined(self._run.end())
        # An empty last run is still joined with a space.
        return [text if self._run_has_text or not self._has_text else " "]

    def token_text(self, token: str) -> bytes:
        marks = dict.fromkeys(map(ord, self._rules.marks))
        return token.translate(marks).encode("utf-8", "surrogateescape")

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
        self._hold_chunks = hold_chunks
        self._count = 0  # of tokens
        self._after_special = False
        # The chunk that is not ended yet:
        self._at_start = True
        self._pending: list[str] = []
        # The text of the run so far:
        self._utf8: Any = codecs.getincrementaldecoder("utf-8")(_ONE_EACH)
        self._started = False
        self._trailing = ""

    def put(self, text: str, first: str, count: int) -> str:
        """Adds the symbols of some tokens, joined; also given are the first, and their number."""
        index, self._count = self._count, self._count + count
        if index == 0:
            text = self._rules.first_symbols.get(first, first) + text[len(first) :]
        chunk, *rest = text.split(self._rules.marks[0])
        needs_space = self._after_special and index == 1 and self._needs_space(chunk)
        result = [" " if needs_space else "", self._continued(chunk)]
        if rest:
            is_first = index == 0 and not chunk
            result += self._chunks(rest[::2], rest[1::2], is_first)
        return self._final("".join(result))

    def end(self) -> str:
        return self._final("".join(self._pending), is_end=True)

    def _chunks(self, specials: list[str], chunks: list[str], is_first: bool) -> list[str]:
        """Ends the chunk with a special token, and adds others with the chunks after them."""
        mode = self._rules.space_before_chunk
        space = "" if mode == "never" else " "
        begins = "" if self._after_special or (is_first and mode == "inner") else space
        if is_first and self._needs_space(chunks[0]):
            specials[0] += " "
        result = [begins, *self._pending, specials[0]]
        before, after = (space, "") if self._hold_chunks else ("", space)
        ignored, removed = self._rules.ignored_at_start, self._rules.space_at_start
        result += [
            f"{before}{chunk.lstrip(ignored).removeprefix(removed)}{after}{special}"
            if chunk
            else special
            for chunk, special in zip(chunks, specials[1:], strict=False)
        ]
        self._pending, self._at_start, self._after_special = [], True, True
        return [*result, self._continued(chunks[-1])]

    def _needs_space(self, chunk: str) -> bool:
        """True if a chunk after a special token at the start gets a space before it."""
        is_spaced = chunk == "" or chunk.startswith(" ")
        return self._rules.space_after_first_special and not is_spaced

    def _continued(self, text: str) -> str:
        """Continues the chunk; returns nothing if it is held back until it ends."""
        if not text:
            return ""
        self._after_special = False
        if self._at_start:
            text = text.lstrip(self._rules.ignored_at_start)
            self._at_start = text == ""
            text = text.removeprefix(self._rules.space_at_start)
        if not self._hold_chunks:
            return text
        self._pending.append(text)
        return ""

    def _final(self, text: str, is_end: bool = False) -> str:
        """The text without marks, with characters in place of bytes, and stripped.

        An invalid byte becomes U+FFFD. Unfinished characters, and white space that may be at the
        end, are held back until more follows.
        """
        if not text.isascii() or self._utf8.buffer:  # marks are no ASCII
            _, _, empty, kept = self._rules.marks
            *ended, last = text.replace(kept, "").split(empty)  # a character ends at such a token
            text = "".join([self._characters(part, True) for part in ended])
            text += self._characters(last, is_end)
        if not self._rules.strip_text:
            return text
        text = self._trailing + text
        if not self._started:
            text = text.lstrip()
            self._started = text != ""
        kept = text.rstrip()
        self._trailing = text[len(kept) :]
        return kept

    def _characters(self, text: str, is_end: bool) -> str:
        return self._utf8.decode(text.encode("utf-8", "surrogateescape"), is_end)
