"""Sentencepiece models: loads untrusted ones, and writes new ones.

The few fields of sentencepiece's ModelProto that are needed beside its library are read and written
without the protobuf library. Field numbers are those of ``sentencepiece_model.proto``. Protobuf
readers merge repeated messages, and later fields override earlier ones, so appended bytes change
options.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import sentencepiece

from jaxllm.common.errors import JaxLLMError, TokenizerError, UnsupportedError
from jaxllm.tokenizers.limits import (
    MAX_NORMALIZER_GROWTH,
    MAX_TOKEN_BYTES,
    charsmap_growth,
    check_normalized_size,
)

MAX_PIECES = 2**19
UNIGRAM = 1
BPE = 2
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


@dataclass(frozen=True)
class NormalizerFlags:
    """Sentencepiece's options for spaces, with protobuf's defaults.

    ``growth`` is the largest number of bytes that the normalizer can make of one byte, and
    ``charsmap`` its compiled rules.
    """

    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    growth: int = 1
    charsmap: bytes = b""


class SentencePieceModel:
    """A sentencepiece model: holds its pieces, and splits text into them.

    Attributes:
        pieces: all pieces, by id.
        vocabulary: the same as a set.
        unk_id, unk_piece: the unknown piece.
        unk_text: decoded text of the unknown piece.
        control: control pieces, such as ``<s>``.
        bytes: byte pieces.
        flags: options of the normaliser for spaces.
        model_type: sentencepiece's number of the algorithm, such as `UNIGRAM` and `BPE`.
    """

    def __init__(self, model: bytes, source: str) -> None:
        self._source = source
        self.flags = read_normalizer_flags(model, source)
        self.model_type = read_model_type(model, source)
        if self.flags.growth > MAX_NORMALIZER_GROWTH:
            raise UnsupportedError(
                f"{source}: the normalizer can make a text more than {MAX_NORMALIZER_GROWTH} times"
                " longer, which no known tokenizer does"
            )
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

    @property
    def scored_pieces(self) -> list[tuple[str, float]]:
        """All pieces with their scores, by id."""
        with self._library():
            return [(piece, self._processor.get_score(i)) for i, piece in enumerate(self.pieces)]

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
        check_normalized_size(self._processor.normalize, text, self.flags.growth, self._source)

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


def read_normalizer_flags(model: bytes, source: str) -> NormalizerFlags:
    """Reads the normalizer flags of a serialised ModelProto."""
    add_dummy_prefix = remove_extra_whitespaces = True
    charsmap = b""
    pieces = 0
    try:
        for field, message in _fields(model):
            pieces += field == 1
            if pieces > MAX_PIECES:
                raise TokenizerError(f"{source}: more than {MAX_PIECES} pieces")
            if field == 3 and isinstance(message, bytes):
                for inner, value in _fields(message):
                    if inner == 3:
                        add_dummy_prefix = bool(value)
                    elif inner == 4:
                        remove_extra_whitespaces = bool(value)
                    elif inner == 2 and isinstance(value, bytes):
                        charsmap = value
    except (IndexError, ValueError) as failure:
        raise TokenizerError(f"{source}: not a sentencepiece model") from failure
    # With escaped spaces, each space becomes the three bytes of "▁".
    growth = max(3, charsmap_growth(charsmap))
    return NormalizerFlags(add_dummy_prefix, remove_extra_whitespaces, growth, charsmap)


def read_model_type(model: bytes, source: str) -> int:
    """Reads the number of the algorithm of a serialised ModelProto."""
    model_type = UNIGRAM  # protobuf's default
    try:
        for field, message in _fields(model):
            if field == 2 and isinstance(message, bytes):
                for inner, value in _fields(message):
                    if inner == 3 and isinstance(value, int):
                        model_type = value
    except (IndexError, ValueError) as failure:
        raise TokenizerError(f"{source}: not a sentencepiece model") from failure
    return model_type


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
    )
    normalizer = (
        _bytes(2, charsmap)
        + _number(3, add_dummy_prefix)
        + _number(4, remove_extra_whitespaces)
        + _number(5, True)  # spaces are written as ▁
    )
    body = b"".join(_bytes(1, _piece(*piece)) for piece in pieces)
    return body + _bytes(2, trainer) + _bytes(3, normalizer)


def _piece(text: str, score: float, piece_type: int) -> bytes:
    score_field = b"\x15" + struct.pack("<f", score)  # field 2, a 32-bit float
    return _bytes(1, text.encode()) + score_field + _number(3, piece_type)


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


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields field numbers and values of a message; fixed-width numbers as bytes."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        match key & 7:
            case 0:
                value, position = _read_varint(data, position)
                yield key >> 3, value
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
        yield key >> 3, data[position : position + size]
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
