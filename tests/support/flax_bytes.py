"""Msgpack files for tests, made byte by byte as flax.serialization makes them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

CHUNKED = "__msgpack_chunked_array__"


def _sized(codes: str, sizes: tuple[int, ...], length: int) -> bytes:
    """The first byte and the length of a value, in the fewest bytes."""
    number, size = next((i, size) for i, size in enumerate(sizes) if length < 1 << (8 * size))
    return bytes([int(codes, 16) + number]) + length.to_bytes(size, "big")


def extension(code: int, content: bytes) -> bytes:
    if len(content) in (1, 2, 4, 8, 16):
        return bytes([0xD4 + len(content).bit_length() - 1]) + struct.pack("b", code) + content
    return _sized("c7", (1, 2, 4), len(content)) + struct.pack("b", code) + content


def array_content(shape: Any, dtype: Any, data: Any) -> bytes:
    """The content of an array's extension; the values may be wrong on purpose."""
    return b"\x93" + packed(shape) + packed(dtype) + packed(data)


def packed(value: Any) -> bytes:
    """A value in msgpack; an array, or a tuple (type, content), is an extension."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int() if 0 <= value < 128 or -32 <= value < 0:
            return struct.pack("b" if value < 0 else "B", value)
        case int() if value < 0:
            return b"\xd3" + struct.pack(">q", value)
        case int():
            return _sized("cc", (1, 2, 4, 8), value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            data = value.encode()
            short = bytes([0xA0 + len(data)]) if len(data) < 32 else b""
            return (short or _sized("d9", (1, 2, 4), len(data))) + data
        case bytes():
            return _sized("c4", (1, 2, 4), len(value)) + value
        case list():
            short = bytes([0x90 + len(value)]) if len(value) < 16 else b""
            return (short or _sized("dc", (2, 4), len(value))) + b"".join(map(packed, value))
        case dict():
            short = bytes([0x80 + len(value)]) if len(value) < 16 else b""
            entries = b"".join(packed(key) + packed(item) for key, item in value.items())
            return (short or _sized("de", (2, 4), len(value))) + entries
        case tuple():
            return extension(*value)
        case np.ndarray() | np.generic():
            code = 1 if isinstance(value, np.ndarray) else 3
            content = array_content(list(value.shape), value.dtype.name, value.tobytes())
            return extension(code, content)
    raise TypeError(type(value))


def in_chunks(array: np.ndarray, elements: int) -> dict[str, Any]:
    """An array as flax stores one of more than 2**30 bytes, in chunks of so many elements."""
    flat = array.reshape(-1)
    chunks = [flat[i : i + elements] for i in range(0, flat.size, elements)]
    return {
        CHUNKED: True,
        "shape": {str(i): size for i, size in enumerate(array.shape)},
        "chunks": {str(i): chunk for i, chunk in enumerate(chunks)},
    }


def leaf(shape: Any = (2,), dtype: Any = "float32", data: Any = bytes(8)) -> tuple[int, bytes]:
    """An array's extension with this content, for `packed`."""
    return 1, array_content(list(shape) if isinstance(shape, tuple) else shape, dtype, data)


def entry(name: str, value: Any) -> dict[str, Any]:
    return {"layer": {name: value}}


VALID = np.arange(6, dtype=np.float32).reshape(2, 3)
_IN_CHUNKS = in_chunks(VALID, 4)

# name: (file, what the message says)
MALFORMED = {
    "a byte that msgpack does not use": (b"\xc1", "the outermost value begins with the byte 0xc1"),
    "a map of 2**32 - 1 entries": (b"\xdf\xff\xff\xff\xff", "map of 4294967295 entries"),
    "a list of 2**32 - 1 items": (b"\x81\xa1a\xdd\xff\xff\xff\xff", "'a' is a list of 4294967295"),
    "a text of 2**32 - 1 bytes": (b"\x81\xa1a\xdb\xff\xff\xff\xff", "'a' is beyond 16777216 bytes"),
    "a text of 2**16 bytes": (b"\x81\xa1a\xda\xff\xff", "'a' needs 65535 bytes, and 0 are left"),
    "bytes of 2**32 - 1": (b"\x81\xa1a\xc6\xff\xff\xff\xff", "'a' is beyond 16777216 bytes"),
    "an extension of 2**32 - 1 bytes": (
        b"\x81\xa1a\xc9\xff\xff\xff\xff\x01",
        "'a' needs 4294967295 bytes, and 0 are left",
    ),
    "100,000 maps in each other": (b"\x81\xa1a" * 100_000, "nested deeper than 32 levels"),
    "100,000 lists in each other": (b"\x81\xa1a" + b"\x91" * 100_000, "deeper than 32 levels"),
    "300,000 values": (b"\x81\xa1a\xdd\x00\x04\x93\xe0" + b"\xc0" * 300_000, "first 262144 values"),
    "a key twice": (b"\x82\xa1a\xc0\xa1a\xc0", "'a' appears twice"),
    "a number as a key": (b"\x81\x01\xc0", "the outermost value has a key that is no text"),
    "a key of 1025 bytes": (packed({"k" * 1025: None}), "key that is no text of at most 1024"),
    "a key that is not UTF-8": (b"\x81\xa1\xff\xc0", "text that is not UTF-8"),
    "a second value": (packed({"w": VALID}) + b"\xc0", "1 bytes follow the end"),
    "only a part": (packed({"w": VALID})[:-1], "'w' needs .* bytes, and .* incomplete download"),
    "a complex number": (
        packed(entry("w", (2, b"\x92\x00\x00"))),
        "'layer/w' .* 2, a complex",
    ),
    "a NumPy scalar": (packed(entry("w", np.float32(1))), "'layer/w' .* type 3, a NumPy scalar"),
    "a timestamp": (packed(entry("w", (-1, bytes(4)))), "'layer/w' .* extension of type -1"),
    "an array of two items": (packed(entry("w", (1, b"\x92\x90\xa1x"))), "'layer/w' is no array"),
    "a shape that is a number": (packed(entry("w", leaf(2))), "'layer/w' must have a shape"),
    "33 axes": (packed(entry("w", leaf((1,) * 32 + (2,)))), "a shape of at most 32 sizes"),
    "a negative size": (packed(entry("w", leaf((-2,)))), "non-negative integers"),
    "a fractional size": (packed(entry("w", leaf((2.0,)))), "non-negative integers"),
    "a boolean size": (packed(entry("w", leaf((True, 2)))), "non-negative integers"),
    "an unknown dtype": (packed(entry("w", leaf(dtype="float31"))), "'layer/w' .* dtype 'float31'"),
    "a dtype that is a list": (packed(entry("w", leaf(dtype=["f"]))), "'layer/w' has the dtype"),
    "data that is text": (packed(entry("w", leaf(data="12345678"))), "a value of kind str"),
    "more values than data": (packed(entry("w", leaf((3,)))), r"float32 of shape \(3,\), which 8"),
    "a product that wraps to 8": (packed(entry("w", leaf((2**32, 2**32, 2)))), "do not fill"),
    "empty but huge": (packed(entry("w", leaf((0, 2**62, 2**62), data=b""))), "do not fill"),
    "data of 2**32 - 1 bytes": (
        packed(entry("w", (1, b"\x93\x91\x02\xa7float32\xc6\xff\xff\xff\xff" + bytes(8)))),
        "'layer/w' .* lengths do not agree: it has 8 bytes of data, and announces 4294967295",
    ),
    "a longer extension": (
        packed(entry("w", (1, array_content([2], "float32", bytes(8)) + b"\x00"))),
        "'layer/w' .* lengths do not agree: it has 9 bytes of data, and announces 8",
    ),
    "chunks without a shape": (packed(entry("w", {**_IN_CHUNKS, "shape": {}})), "without a valid"),
    "chunks of more": (packed(entry("w", {**_IN_CHUNKS, "shape": {"0": 7}})), "do not fill"),
    "chunks and a shape of text": (
        packed(entry("w", {**_IN_CHUNKS, "shape": {"0": "6"}})),
        "'layer/w' is an array in chunks without a valid shape",
    ),
    "no chunks": (packed(entry("w", {**_IN_CHUNKS, "chunks": {}})), "without a valid shape"),
    "chunks with a gap": (
        packed(entry("w", {**_IN_CHUNKS, "chunks": {"0": VALID[0], "2": VALID[1]}})),
        "'layer/w' is an array in chunks without a valid",
    ),
    "chunks of two dtypes": (
        packed(entry("w", {**_IN_CHUNKS, "chunks": {"0": VALID[0], "1": VALID[1].astype("f2")}})),
        "'layer/w/chunks/1' is float16, and chunk 0 is float32",
    ),
    "a chunk that is a map": (
        packed(entry("w", {**_IN_CHUNKS, "chunks": {"0": {}, "1": VALID[1]}})),
        "'layer/w/chunks/0' is not a flat array",
    ),
    "a chunk of two axes": (
        packed(entry("w", {**_IN_CHUNKS, "chunks": {"0": VALID}})),
        "'layer/w/chunks/0' is not a flat array",
    ),
}


def at_odd_byte(tree: dict[str, Any], odd: int) -> bytes:
    """The tree after an empty map, whose name has so many letters: arrays begin elsewhere."""
    return packed({"x" * odd: {}, **tree})
