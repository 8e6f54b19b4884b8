"""Sentencepiece models: loads untrusted ones, splits texts into pieces, and decodes pieces.

The few fields of sentencepiece's ModelProto that are needed beside its library are read and written
without the protobuf library. Field numbers are those of ``sentencepiece_model.proto``. Protobuf
readers merge repeated messages, and later fields override earlier ones, so appended bytes change
options. They ignore a field with another wire type than the one it is declared with.

Pieces are decoded to text as transformers 4.57's slow tokenizers do, in three layers, from outer to
inner: added tokens are joined to the surrounding text with spaces; special tokens split the text
into chunks; each chunk is decoded as by sentencepiece's ``Decode``. So that long texts need no work
in Python for each token, every token has a *symbol*: its text inside a chunk, with marks where it
is more than text. The symbols of many tokens are joined at once, and split at the marks. A mark is
a character that no token has; a byte that is no ASCII is a lone surrogate, as for Python's
"surrogateescape".
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from jaxllm.common.errors import JaxLLMError, TokenizerError, UnsupportedError
from jaxllm.tokenizers.stream_decoder import Stage
from jaxllm.tokenizers.tokenizer_json_check import (
    MAX_NORMALIZER_GROWTH,
    MAX_TOKEN_BYTES,
    charsmap_growth,
    check_normalized_size,
)

MAX_PIECES = 2**19
UNIGRAM = 1
BPE = 2
# Wire types: how a field's value is encoded.
VARINT, BYTES = 0, 2
SPACE = "▁"
# normalizer_spec (field 3) with add_dummy_prefix (field 3) false
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class PieceType(IntEnum):
    """Types of pieces, with sentencepiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SentencePieceModel:
    """A sentencepiece model: holds its pieces, and splits text into them.

    Attributes:
        pieces: all pieces, by id.
        vocabulary: the same as a set.
        unk_id, unk_piece: the unknown piece.
        unk_text: decoded text of the unknown piece.
        control: control pieces, such as ``<s>``.
        bytes: byte pieces.
        model_type: sentencepiece's number of the algorithm, such as `UNIGRAM` and `BPE`.
        charsmap: compiled rules of the normalizer.
        add_dummy_prefix, remove_extra_whitespaces: the normalizer's options for spaces.
        space_is_suffix: ``▁`` ends a piece, where it begins one otherwise.
    """

    def __init__(self, model: bytes, source: str) -> None:
        self._source = source
        trainer, normalizer, denormalizer = read_specs(model, source)
        if denormalizer.get((2, BYTES)):
            raise UnsupportedError(
                f"{source}: denormalizer_spec: rules that change decoded texts are not supported; "
                "use a model that was trained without denormalization rules"
            )
        self.model_type: int = trainer.get((3, VARINT), UNIGRAM)
        self.charsmap: bytes = normalizer.get((2, BYTES), b"")
        self.add_dummy_prefix = bool(normalizer.get((3, VARINT), True))
        self.remove_extra_whitespaces = bool(normalizer.get((4, VARINT), True))
        self.space_is_suffix = bool(trainer.get((24, VARINT), False))
        # With escaped spaces, each space becomes the three bytes of "▁".
        self._growth = max(3, charsmap_growth(self.charsmap))
        if self._growth > MAX_NORMALIZER_GROWTH:
            raise UnsupportedError(
                f"{source}: the normalizer can make a text more than {MAX_NORMALIZER_GROWTH} times"
                " longer, which no known tokenizer does"
            )
        import sentencepiece  # only where a model is read

        self._processor = processor = sentencepiece.SentencePieceProcessor()
        with self._library():
            processor.LoadFromSerializedProto(model)
            ids = range(processor.get_piece_size())
            if processor.unk_id() not in ids:
                raise TokenizerError(f"{source}: the model has no unknown piece")
            self.pieces: list[str] = [processor.id_to_piece(i) for i in ids]
        if max(len(piece.encode()) for piece in self.pieces) > MAX_TOKEN_BYTES:
            raise TokenizerError(f"{source}: a piece has more than {MAX_TOKEN_BYTES} bytes")
        self.vocabulary = frozenset(self.pieces)
        self.unk_id = processor.unk_id()
        self.unk_piece = self.pieces[self.unk_id]
        with self._library():
            self.unk_text: str = processor.decode_pieces([self.unk_piece])
        if len(self.unk_text.encode()) > MAX_TOKEN_BYTES:
            raise TokenizerError(f"{source}: unk_surface has more than {MAX_TOKEN_BYTES} bytes")
        self.control = frozenset(self.pieces[i] for i in ids if processor.is_control(i))
        self.bytes = frozenset(self.pieces[i] for i in ids if processor.is_byte(i))

    @cached_property
    def has_spaces_at_ends(self) -> bool:
        """True if decoded texts may begin or end with white space."""
        if not self.remove_extra_whitespaces or self.space_is_suffix or self.bytes:
            return True
        texts = (piece.replace(SPACE, " ") for piece in self.pieces if piece != SPACE)
        return any(text != text.rstrip() for text in texts)

    def encode(self, text: str) -> list[str]:
        """Splits text into pieces; a run of unknown characters is a piece without an id."""
        with self._library():
            self._check_size(text)
            return self._processor.encode(text, out_type=str)

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of the pieces of texts; several texts are encoded in the library's threads."""
        with self._library():
            for text in texts:
                self._check_size(text)
            if len(texts) == 1:
                return [self._processor.encode(texts[0])]
            return self._processor.encode(list(texts))

    def _check_size(self, text: str) -> None:
        check_normalized_size(self._processor.normalize, text, self._growth, self._source)

    @contextmanager
    def _library(self) -> Generator[None]:
        """Context of calls of the library, whose errors become TokenizerErrors."""
        try:
            yield
        except JaxLLMError:
            raise
        except (RuntimeError, OSError, ValueError, TypeError) as failure:  # including invalid UTF-8
            raise TokenizerError(
                f"{self._source}: not a sentencepiece model ({failure})"
            ) from failure


Fields = dict[tuple[int, int], Any]
"""Values of a message's fields, by number and wire type."""


def read_specs(model: bytes, source: str) -> tuple[Fields, Fields, Fields]:
    """Reads the fields of a serialised ModelProto's trainer_spec, normalizer_spec and
    denormalizer_spec."""
    trainer: Fields = {}
    normalizer: Fields = {}
    denormalizer: Fields = {}
    specs = {(2, BYTES): trainer, (3, BYTES): normalizer, (5, BYTES): denormalizer}
    pieces = 0
    try:
        for field, message in _fields(model):
            pieces += field == (1, BYTES)
            if pieces > MAX_PIECES:
                raise TokenizerError(f"{source}: more than {MAX_PIECES} pieces")
            if field in specs:
                specs[field] |= dict(_fields(message))
    except (IndexError, ValueError) as failure:
        raise TokenizerError(f"{source}: not a sentencepiece model") from failure
    return trainer, normalizer, denormalizer


def write_model(
    pieces: Sequence[tuple[str, float, int]],
    *,
    model_type: int,
    unk_id: int,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    byte_fallback: bool,
    charsmap: bytes = b"",
) -> bytes:
    """Serialises a ModelProto from ``(piece, score, type)`` triples in id order."""
    trainer = (
        _number(3, model_type)
        + _number(4, len(pieces))
        + _number(35, byte_fallback)
        + _number(40, unk_id)
        + _bytes(45, pieces[unk_id][0].encode())  # the library finds the unknown piece by its text
    )
    normalizer = (
        _bytes(2, charsmap)
        + _number(3, add_dummy_prefix)
        + _number(4, remove_extra_whitespaces)
        + _number(5, True)  # spaces are written as ▁
    )
    body = b"".join(
        # The score is field 2, a 32-bit float.
        _bytes(1, _bytes(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for text, score, kind in pieces
    )
    return body + _bytes(2, trainer) + _bytes(3, normalizer)


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _fields(data: bytes) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yields number and wire type of a message's fields, with their values: varints as integers,
    others as bytes."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        if key >= 2**32:  # sentencepiece would read the lowest 32 bits, as another field
            raise ValueError(f"field key {key}")
        match key & 7:
            case 0:
                value, position = _read_varint(data, position)
                yield (key >> 3, VARINT), value
                continue
            case 1:
                size = 8
            case 2:
                size, position = _read_varint(data, position)
            case 5:
                size = 4
            case wire_type:
                raise ValueError(f"wire type {wire_type}")
        if size > len(data) - position:
            raise ValueError("a field reaches past the end")
        yield (key >> 3, key & 7), data[position : position + size]
        position += size


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number of more than 64 bits")


_MARKS = "".join(map(chr, (*range(0x80, 0xA0), *range(0xD800, 0xD804))))
"""Candidates for marks: characters that may occur in no token. The first ones leave a text as one
byte each."""
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
        keeps_inner_spaces: only the first chunk loses the space that encoding put before it.
        unknown_has_spaces: ``▁`` is a space in tokens that the model lacks too (Marian's, which are
            of two models).
    """

    model: SentencePieceModel
    special: frozenset[str]
    separate: frozenset[str] = frozenset()
    add_prefix_space: bool = False
    space_before_chunk: str = "never"
    space_after_first_special: bool = False
    strip_text: bool = False
    after_special: str = ""
    keeps_inner_spaces: bool = False
    unknown_has_spaces: bool = False

    def __deepcopy__(self, memo: object) -> DecodeRules:
        return self  # copies of a decoder share its rules, which do not change

    @cached_property
    def marks(self) -> tuple[str, str, str, str]:
        """Marks around special tokens, around separate tokens, for `empty` and for `kept`."""
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
        found = (token for token in tokens if token.startswith(SPACE))
        return {self.symbol(token): self._without_first_space(token) for token in found}

    def _without_first_space(self, token: str) -> str:
        """The symbol of a token with ``▁`` that comes first; the rest of a run is spaces."""
        rest = token[1:]
        is_run = rest.strip(SPACE) == "" and rest not in self.special
        return self._kept(" " * len(rest)) if is_run else self._inner_symbol(rest)

    @cached_property
    def ignored_at_start(self) -> str:
        """Marks and spaces after which a chunk is still at its start."""
        return f" {self.empty}" if self.model.remove_extra_whitespaces else self.empty

    @cached_property
    def space_at_start(self) -> str:
        """The space that is removed from the start of a chunk after what is ignored, or nothing."""
        model = self.model
        return " " if model.add_dummy_prefix or model.remove_extra_whitespaces else ""


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
        keeps_spaces = self._rules.keeps_inner_spaces
        if keeps_spaces:
            ignored, removed = "", ""
        result += [
            f"{before}{chunk.lstrip(ignored).removeprefix(removed)}{after}{special}"
            if chunk
            else special
            for chunk, special in zip(chunks, specials[1:], strict=False)
        ]
        self._pending, self._at_start, self._after_special = [], not keeps_spaces, True
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
