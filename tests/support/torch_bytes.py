"""Files as `torch.save` writes them, and damaged ones, made without torch.

A pickle is put together from operations, so that it can say anything. Nothing here unpickles.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

STORAGES = {
    **{"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"},
    **{"float64": "DoubleStorage", "int64": "LongStorage", "int32": "IntStorage"},
    **{"int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage"},
    "bool": "BoolStorage",
}
MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
VERSION = bytes.fromhex("80024de9032e")
DICT, LIST, MARK, NONE, TRUE = b"}", b"]", b"(", b"N", b"\x88"
TUPLE, EMPTY, REDUCE, BUILD, SETITEM, SETITEMS = b"t", b")", b"R", b"b", b"s", b"u"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def name(value: str) -> bytes:
    module, _, last = value.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def together(*values: bytes) -> bytes:
    """A tuple."""
    return MARK + b"".join(values) + TUPLE


def numbers(values: Sequence[int]) -> bytes:
    return together(*map(number, values))


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


ORDERED = name("collections.OrderedDict") + EMPTY + REDUCE


@dataclass(frozen=True)
class Part:
    """A tensor of a file: a view of a storage."""

    key: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    count: int
    dtype: str = "float32"
    offset: int = 0

    def pickle(self, *, is_legacy: bool = False) -> bytes:
        storage = together(
            text("storage"),
            name(f"torch.{STORAGES.get(self.dtype, self.dtype)}"),
            text(self.key),
            text("cpu"),
            number(self.count),
            *([NONE] if is_legacy else []),
        )
        return (
            name("torch._utils._rebuild_tensor_v2")
            + together(
                storage + b"Q",
                number(self.offset),
                numbers(self.shape),
                numbers(self.strides),
                b"\x89",
                ORDERED,
            )
            + REDUCE
        )


def whole(key: str, values: np.ndarray) -> Part:
    """A tensor that is all of a storage."""
    strides = tuple(stride // values.itemsize for stride in values.strides)
    return Part(key, values.shape, strides, values.size, values.dtype.name)


def state_pickle(tensors: Mapping[str, Part], *, is_legacy: bool = False) -> bytes:
    items = b"".join(text(key) + part.pickle(is_legacy=is_legacy) for key, part in tensors.items())
    return pickled(ORDERED + MARK + items + SETITEMS)


def zip_file(
    pickle: bytes,
    storages: Mapping[str, bytes],
    *,
    byteorder: str | None = "little",
    folder: str = "archive",
    **others: bytes,
) -> bytes:
    """A zip file with these members; `others` are more of them."""
    members = {"data.pkl": pickle, "version": b"3\n"}
    if byteorder is not None:
        members["byteorder"] = byteorder.encode()
    members |= {f"data/{key}": data for key, data in storages.items()} | others
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            archive.writestr(f"{folder}/{member}", data)
    return target.getvalue()


def legacy_file(
    pickle: bytes, storages: Mapping[str, bytes], counts: Mapping[str, int] | None = None
) -> bytes:
    """The format before zip files, with these storages of float32 in their order."""
    facts = pickled(DICT + text("little_endian") + TRUE + SETITEM)
    keys = pickled(LIST + MARK + b"".join(map(text, storages)) + b"e")
    counts = counts or {key: len(data) // 4 for key, data in storages.items()}
    data = b"".join(struct.pack("<q", counts[key]) + x for key, x in storages.items())
    return MAGIC + VERSION + facts + pickle + keys + data


def example(*, is_legacy: bool) -> bytes:
    """A small valid file with two names of one storage, and a transposed tensor."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    parts = {
        "embed.weight": whole("0", values),
        "head.weight": whole("0", values),
        "turned": Part("0", (4, 3), (1, 4), 12),
        "row": Part("0", (4,), (1,), 12, offset=4),
        "bias": whole("1", values[0]),
    }
    storages = {"0": values.tobytes(), "1": values[0].tobytes()}
    pickle = state_pickle(parts, is_legacy=is_legacy)
    return (legacy_file if is_legacy else zip_file)(pickle, storages)
