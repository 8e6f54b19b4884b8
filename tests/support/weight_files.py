"""Weight files for tests: arrays of every kind, and files made byte by byte, malformed ones too."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.safetensors import DTYPES

Q = GGMLQuantizationType
BF16 = ml_dtypes.bfloat16


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


def every_dtype() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tensors = {
        f"t.{code}": rng.integers(0, 2, (3, 5)).astype(dtype) for code, dtype in DTYPES.items()
    }
    return tensors | {
        'ü"\n': rng.normal(size=(2, 3)).astype(np.float32),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "nan": np.array([np.nan, -np.inf, -0.0], BF16),
    }


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()  # NaN included


def st_entry(shape=(2,), offsets=(0, 8), dtype="F32", **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


# name: (header, bytes of data, what the message says)
MALFORMED_SAFETENSORS = {
    "not an object": (b"[]", 0, "no JSON object"),
    "leading space": (b' {"w":{}}', 0, "no JSON object"),
    "not JSON": (b"{", 0, "not JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "UTF-8"),
    "duplicate tensor": (
        b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "'w' appears twice",
    ),
    "duplicate field": (b'{"w":{"dtype":"U8","dtype":"I8"}}', 0, "'dtype' appears twice"),
    "surrogate name": (b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, "surrog"),
    "too deep": (b'{"w":' + b"[" * 99999 + b"]" * 99999 + b"}", 0, "deeper"),
    "tensor is a list": ({"w": []}, 0, "exactly dtype"),
    "missing field": ({"w": {"dtype": "F32", "shape": [2]}}, 8, "exactly dtype"),
    "unknown field": ({"w": st_entry(extra=1)}, 8, "exactly dtype"),
    "unknown dtype": ({"w": st_entry(dtype="F31")}, 8, "unknown dtype 'F31'"),
    "dtype is a list": ({"w": st_entry(dtype=["F32"])}, 8, "unknown dtype"),
    "negative size": ({"w": st_entry(shape=(-2,))}, 8, "non-negative integers"),
    "fractional size": ({"w": st_entry(shape=(2.0,))}, 8, "non-negative integers"),
    "boolean size": ({"w": st_entry(shape=(True, 2))}, 8, "non-negative integers"),
    "shape is a number": ({"w": st_entry() | {"shape": 2}}, 8, "non-negative integers"),
    "65 dimensions": ({"w": st_entry(shape=[1] * 64 + [2])}, 8, "at most 64"),
    "three offsets": ({"w": st_entry(offsets=(0, 8, 8))}, 8, "data_offsets must be"),
    "negative offset": ({"w": st_entry(offsets=(-8, 0))}, 8, "data_offsets must be"),
    "end before begin": ({"w": st_entry(offsets=(8, 0))}, 8, "begin <= end"),
    "past the end": (
        {"w": st_entry(shape=(4,), offsets=(0, 16))},
        8,
        "incomplete download",
    ),
    "offset of 2**64 + 8": (
        {"w": st_entry(offsets=(0, 2**64 + 8))},
        8,
        "incomplete download",
    ),
    "wrong size": ({"w": st_entry(shape=(3,))}, 8, "does not take the 8 bytes"),
    "product wraps to 8": ({"w": st_entry(shape=(2**32, 2**32, 2))}, 8, "does not take"),
    "product wraps to 0": ({"w": st_entry((2**62, 4), (0, 0))}, 0, "does not take"),
    "empty but huge": ({"w": st_entry((0, 2**62, 2**62), (0, 0))}, 0, "too large"),
    "gap": (
        {"a": st_entry((1,), (0, 4)), "b": st_entry((1,), (8, 12))},
        12,
        "'b' leaves a gap",
    ),
    "gap at the start": ({"w": st_entry((1,), (4, 8))}, 8, "leaves a gap"),
    "overlap": (
        {"a": st_entry((2,), (0, 8)), "b": st_entry((2,), (4, 12))},
        12,
        "overlaps",
    ),
    "same bytes": ({"a": st_entry(), "b": st_entry()}, 8, "overlaps"),
    "trailing bytes": ({"w": st_entry()}, 12, "4 bytes follow"),
    "no tensors but data": ({}, 1, "1 bytes follow"),
    "metadata is a list": ({"__metadata__": []}, 0, "strings to strings"),
    "metadata is null": ({"__metadata__": None}, 0, "strings to strings"),
    "metadata value is a number": ({"__metadata__": {"a": 1}}, 0, "strings to strings"),
}


SCALES_AT = {Q.Q8_0: (0,), Q.Q4_0: (0,), Q.Q4_1: (0, 2), Q.Q4_K: (0, 2), Q.Q6_K: (208,)}


def random_blocks(kind: Q, rows: int, width: int) -> np.ndarray:
    """Rows of blocks of random bytes, with half-precision scales that are finite and unlike."""
    size, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (rows * width // size, block_bytes), np.uint8)
    for index in SCALES_AT[kind]:
        scale = rng.uniform(-2, 2, len(blocks)).astype(np.float16)
        blocks[:, index : index + 2] = scale[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(path, tensors: dict[str, tuple[np.ndarray, Q | None]], **fields) -> GGUFFile:
    """Write a file with gguf's own writer and open it."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(*value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def with_tensors(*tensors: bytes, size: int = 64, fields: tuple[bytes, ...] = ()) -> bytes:
    return gguf_bytes(list(fields), list(tensors), b"\0" * size)


VALID = gguf_tensor("w", [4], 0, 0)
HUGE = struct.pack("<Q", 2**63)

# name: (file, what the message says)
MALFORMED_GGUF = {
    "other magic": (gguf_bytes([], [], magic=b"GGML"), "not a GGUF file"),
    "only magic": (b"GGUF", "ends within the version"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "ends within the number of tensors"),
    "2**63 tensors": (gguf_bytes([], [], counts=(2**63, 0)), "number of tensors is 9223372036854"),
    "2**63 fields": (gguf_bytes([], [], counts=(0, 2**63)), "number of metadata fields is 9223"),
    "fewer fields": (gguf_bytes([], [], counts=(0, 7), alignment=1), "ends within"),
    "fewer tensors": (gguf_bytes([], [], counts=(7, 0), alignment=1), "ends within"),
    "a key of 2**63 bytes (49 bytes)": (
        gguf_bytes([HUGE + b"\0" * 17], [], alignment=1),
        "length of a metadata key is 9223372036854775808",
    ),
    "a string of 2**63 bytes": (
        gguf_bytes([gguf_string("k") + struct.pack("<I", 8) + HUGE], []),
        "length of 'k' is 9223372036854775808",
    ),
    "an array of 2**63 strings": (
        gguf_bytes([gguf_string("k") + struct.pack("<II", 9, 8) + HUGE], []),
        "length of 'k' is 9223372036854775808",
    ),
    "an array of 2**24 numbers": (
        gguf_bytes([gguf_field("k", struct.pack("<IIQ", 9, 10, 2**24))], []),
        "ends within 'k'",
    ),
    "an array of arrays": (
        gguf_bytes([gguf_field("k", struct.pack("<IIQ", 9, 9, 1))], []),
        "'k' is an array of arrays",
    ),
    "a value type of 13": (gguf_bytes([gguf_field("k", struct.pack("<I", 13))], []), "type 13"),
    "an element type of 99": (
        gguf_bytes([gguf_field("k", struct.pack("<IIQ", 9, 99, 1))], []),
        "'k' has the unknown value type 99",
    ),
    "a boolean of 2": (
        gguf_bytes([gguf_field("k", struct.pack("<IB", 7, 2))], []),
        "'k' is a bool",
    ),
    "a key that is not UTF-8": (
        gguf_bytes([gguf_string(b"k\xff") + struct.pack("<II", 4, 0)], []),
        r"not UTF-8: b'k\\xff' \(byte 1\)",
    ),
    "a value that is not UTF-8": (
        gguf_bytes([gguf_field("k", struct.pack("<I", 8) + gguf_string(b"\xc3"))], []),
        "'k' is not UTF-8",
    ),
    "a key twice": (gguf_bytes([gguf_field("k", 1), gguf_field("k", 2)], []), "'k' appears twice"),
    "alignment 0": (gguf_bytes([gguf_field("general.alignment", 0)], []), "power of two"),
    "alignment 24": (gguf_bytes([gguf_field("general.alignment", 24)], []), "power of two"),
    "alignment 'a'": (gguf_bytes([gguf_field("general.alignment", "a")], []), "power of two"),
    "alignment 32.0": (gguf_bytes([gguf_field("general.alignment", 32.0)], []), "power of two"),
    "a tensor twice": (
        with_tensors(VALID, gguf_tensor("w", [4], 0, 32)),
        "two tensors .* 'w'",
    ),
    "a name that is not UTF-8": (with_tensors(gguf_tensor(b"\x80", [4], 0, 0)), "not UTF-8"),
    "0 dimensions": (with_tensors(gguf_tensor("w", [], 0, 0)), "'w' has 0 dimensions"),
    "5 dimensions": (with_tensors(gguf_tensor("w", [1] * 5, 0, 0)), "'w' has 5 dimensions"),
    "2**32 - 1 dimensions": (
        with_tensors(gguf_string("w") + struct.pack("<I", 2**32 - 1)),
        "has 4294967295 dimensions",
    ),
    "an empty dimension": (with_tensors(gguf_tensor("w", [4, 0], 0, 0)), "empty dimension"),
    "an unknown type": (with_tensors(gguf_tensor("w", [4], 4, 0)), "unknown ggml type 4"),
    "half a block": (with_tensors(gguf_tensor("w", [48], 8, 0)), "48 values are no whole Q8_0"),
    "an unaligned offset": (with_tensors(gguf_tensor("w", [4], 0, 8)), "offset 8 is no multiple"),
    "past the end": (with_tensors(gguf_tensor("w", [4], 0, 64)), "incomplete download"),
    "an offset that wraps": (
        with_tensors(gguf_tensor("w", [4], 0, 2**64 - 32)),
        "ends at byte 18446744",
    ),
    "a product that wraps to 4": (
        with_tensors(gguf_tensor("w", [2**32, 2**32, 4], 0, 0)),
        "incomplete download",
    ),
    "a size that wraps to 0": (with_tensors(gguf_tensor("w", [2**62], 0, 0)), "incomplete downl"),
    "the same bytes": (
        with_tensors(VALID, gguf_tensor("v", [4], 0, 0)),
        "'w' and 'v' overlap",
    ),
    "overlap": (
        with_tensors(gguf_tensor("v", [4], 0, 32), gguf_tensor("w", [12], 0, 0)),
        "'w' and 'v' overlap",
    ),
}
