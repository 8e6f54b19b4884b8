"""The msgpack reader: every kind of value, and damaged files."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from flax_bytes import MALFORMED, in_chunks, packed

from jaxllm.checkpoint.msgpack import ARRAY, SCALAR, StoredArray, read_msgpack
from jaxllm.common.errors import CheckpointError

VALUES = {
    "small": [0, 127, -1, -32, True, False, None],
    "numbers": [128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1, -33, -(2**63), 1.5],
    "texts": ["", "é" * 15, "x" * 32, "x" * 256, "x" * 65536],
    "binary": [b"", b"\0" * 255, b"\1" * 256],
    "lists": [[], list(range(15)), list(range(16))],
    "maps": {str(number): {} for number in range(16)},
}


def read(data: bytes, **options):
    return read_msgpack(memoryview(data), source="file.msgpack", **options)


def test_every_kind_of_value():
    assert read(packed(VALUES)) == VALUES


def test_numbers_in_other_widths():
    data = b"\x97\xd0\xff\xd1\xff\xfe\xd2\xff\xff\xff\xfd\xcd\x00\x01\xce\0\0\0\2\xcf" + bytes(7)
    data += b"\3\xca\x3f\xc0\0\0"
    assert read(data) == [-1, -2, -3, 1, 2, 3, 1.5]


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16, "int32", "uint8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (3, 5), (2, 3, 300)])
def test_arrays_stay_in_the_file(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    data = packed({"a": {"w": array}, "b": 1})
    found = read(data)["a"]["w"]
    assert isinstance(found, StoredArray)
    assert (found.shape, found.dtype, found.nbytes) == (shape, array.dtype, array.nbytes)
    assert data[found.begin : found.end] == array.tobytes()


def test_an_array_in_chunks_is_in_the_order_of_their_numbers():
    array = np.arange(33, dtype=np.float32).reshape(3, 11)
    tree = in_chunks(array, 3)
    tree["chunks"] = dict(sorted(tree["chunks"].items()))  # "10" before "2"
    data = packed({"w": tree})
    found = read(data)["w"]
    assert (found.shape, found.dtype, found.nbytes) == (array.shape, array.dtype, array.nbytes)
    assert b"".join(data[begin:end] for begin, end in found.pieces) == array.tobytes()


def test_scalars_are_read_where_they_are_expected():
    scalar = np.int32(7)
    found = read(packed({"step": scalar}), extensions=(ARRAY, SCALAR))["step"]
    assert (found.shape, found.dtype) == ((), np.dtype(np.int32))


@pytest.mark.parametrize("name", MALFORMED)
def test_a_damaged_file_is_refused(name):
    data, message = MALFORMED[name]
    with pytest.raises(CheckpointError, match=message) as error:
        read(data)
    assert str(error.value).startswith("file.msgpack: ")


def test_a_file_cut_at_any_byte_is_refused():
    data = packed({"layer": {"w": np.ones((2, 3), np.float32), "c": in_chunks(np.ones(7), 3)}})
    for stop in range(len(data)):
        with pytest.raises(CheckpointError, match=re.escape("file.msgpack: ")):
            read(data[:stop])
