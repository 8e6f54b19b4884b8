"""Weight files made byte by byte, so that tests can break any part of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header (an object for JSON, or its bytes) before the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_field(key: str, value: Any) -> bytes:
    """A metadata field; bytes are taken as the type and the value in the file's own form."""
    match value:
        case bytes():
            packed = value
        case bool():
            packed = struct.pack("<I?", 7, value)
        case int() if 0 <= value < 2**32:
            packed = struct.pack("<II", 4, value)
        case int():
            packed = struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<IQ", 10, value)
        case float():
            packed = struct.pack("<If", 6, value)
        case str():
            packed = struct.pack("<I", 8) + gguf_string(value)
        case list():
            packed = struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
        case _:
            raise TypeError(type(value))
    return gguf_string(key) + packed


def gguf_tensor(name: str | bytes, dims: list[int], kind: int, offset: int) -> bytes:
    """A tensor's description; ``dims`` in GGUF's order."""
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return gguf_string(name) + sizes + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    fields: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; ``counts`` are the numbers of tensors and fields that it claims to have."""
    tensor_count, field_count = counts or (len(tensors), len(fields))
    head = magic + struct.pack("<IQQ", version, tensor_count, field_count)
    head += b"".join(fields) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def written(path: Path, data: bytes) -> Path:
    """The path, after writing the data there."""
    path.write_bytes(data)
    return path
