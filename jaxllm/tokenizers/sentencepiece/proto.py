"""Reads and writes the needed fields of sentencepiece's ModelProto, without the protobuf library.

Field numbers are those of sentencepiece's ``sentencepiece_model.proto``. Protobuf readers merge
repeated messages, and later fields override earlier ones, so appended bytes change options.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxllm.common.errors import TokenizerError

UNIGRAM = 1
BPE = 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# normalizer_spec (field 3) with add_dummy_prefix (field 3) false
WITHOUT_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


@dataclass(frozen=True)
class NormalizerFlags:
    """Sentencepiece's options for spaces, with protobuf's defaults."""

    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_normalizer_flags(model: bytes, source: str) -> NormalizerFlags:
    """Reads the normalizer flags of a serialised ModelProto.

    Raises:
        TokenizerError: the bytes are not a protobuf message.
    """
    add_dummy_prefix = remove_extra_whitespaces = True
    try:
        for field, message in _fields(model):
            if field == 3 and isinstance(message, bytes):
                for inner, value in _fields(message):
                    if inner == 3:
                        add_dummy_prefix = bool(value)
                    elif inner == 4:
                        remove_extra_whitespaces = bool(value)
    except (IndexError, ValueError) as failure:
        raise TokenizerError(f"{source}: not a sentencepiece model") from failure
    return NormalizerFlags(add_dummy_prefix, remove_extra_whitespaces)


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
    body = b"".join(
        _bytes(1, _bytes(1, piece.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for piece, score, kind in pieces
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
