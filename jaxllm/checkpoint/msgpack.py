"""Reads msgpack as Flax writes it: nested maps, whose arrays stay in the file.

The format is https://github.com/msgpack/msgpack/blob/master/spec.md. ``flax.serialization`` adds
extension types: type 1 is an array, type 2 a complex number and type 3 a NumPy scalar. The content
of types 1 and 3 is msgpack again: a list of shape, dtype name and the values' bytes. An array of
more than 2**30 bytes is a map with its shape and flat chunks, each of them an extension of type 1.

The values of arrays are not read. Nothing is allocated before the bytes that fill it are known to
be in the file, and nesting, the number of values and the length of texts are bounded. The msgpack
package copies every array.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.checkpoint.safetensors import DTYPES
from jaxllm.checkpoint.source import StoredTensor
from jaxllm.common.errors import CheckpointError, quoted

ARRAY, COMPLEX, SCALAR = 1, 2, 3  # extension types
MAX_DEPTH = 32  # maps and lists within each other; a T5 checkpoint has 8
MAX_VALUES = 1 << 18  # T5X with its optimizer's states has some 50,000
MAX_TEXT_BYTES = 16 << 20  # of all keys, texts and binary values together
MAX_KEY_BYTES = 1024
MAX_NAME_BYTES = 16 << 20  # of all names together, as in the header of a safetensors file
_MAX_DIMS = 32

_CHUNKED = "__msgpack_chunked_array__"
_DTYPES = {dtype.name: dtype for code, dtype in DTYPES.items() if code != "BOOL"}

# The kind of value that a first byte announces, and the number of bytes of the number after it:
# the value itself, or a length.
_KINDS: dict[int, tuple[str, int]] = {
    **{0xC0: ("nil", 0), 0xC2: ("false", 0), 0xC3: ("true", 0)},
    **{0xC4 + power: ("bin", 1 << power) for power in range(3)},
    **{0xC7 + power: ("ext", 1 << power) for power in range(3)},
    **{0xCA: ("float", 4), 0xCB: ("float", 8)},
    **{0xCC + power: ("uint", 1 << power) for power in range(4)},
    **{0xD0 + power: ("int", 1 << power) for power in range(4)},
    **{0xD4 + power: ("fixext", 0) for power in range(5)},
    **{0xD9 + power: ("str", 1 << power) for power in range(3)},
    **{0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)},
}


@dataclass(frozen=True)
class StoredArray(StoredTensor):
    """An array of a msgpack file.

    Attributes:
        pieces: begin and end of each piece of the array's bytes in the file. Their concatenation
            is the array in C order; a piece may end within a row.
    """

    pieces: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.pieces)


def read_msgpack(
    data: memoryview, *, source: str, extensions: Collection[int] = (ARRAY,)
) -> object:
    """Reads the one value of a msgpack file, whose maps have unique texts as keys.

    Args:
        data: the file's bytes.
        source: the file's name, for errors.
        extensions: the extension types that are read, of `ARRAY` and `SCALAR`.

    Returns:
        ``None``, bool, int, float, str, bytes, list, dict, or :class:`StoredArray` for an array or
        a NumPy scalar.

    >>> read_msgpack(memoryview(b"\\x82\\xa1a\\x07\\xa1b\\x92\\xc0\\xc3"), source="example")
    {'a': 7, 'b': [None, True]}
    """
    reader = _Reader(data, source, extensions)
    value = reader.value(())
    if reader.left:
        raise CheckpointError(
            f"{source}: {reader.left} bytes follow the end of the msgpack value; was the file "
            "damaged, or written over another one?"
        )
    return value


def flattened(
    tree: Mapping[str, Any],
    source: str,
    is_leaf: Callable[[Mapping[str, Any]], bool] = lambda _: False,
) -> dict[str, Any]:
    """The values of a nested map by the keys that lead to them, joined by "/".

    Args:
        source: the file's name, for errors.
        is_leaf: True for a map that is a value itself.

    Raises:
        CheckpointError: two values have the same name, or the names together have more than
            `MAX_NAME_BYTES` characters.
    """
    leaves: dict[str, Any] = {}
    name_bytes = 0
    for name, leaf in _leaves(tree, (), is_leaf):
        where = f"{source}: tensor {quoted(name)}"
        if name in leaves:
            raise CheckpointError(f"{where}: two arrays have this name")
        name_bytes += len(name)
        if name_bytes > MAX_NAME_BYTES:
            raise CheckpointError(f"{where} is beyond {MAX_NAME_BYTES} bytes of names")
        leaves[name] = leaf
    return leaves


def _leaves(
    tree: Mapping[str, Any], path: tuple[str, ...], is_leaf: Callable[[Mapping[str, Any]], bool]
) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and not is_leaf(value):
            yield from _leaves(value, (*path, key), is_leaf)
        else:
            yield "/".join((*path, key)), value


class _Reader:
    """Cursor over msgpack bytes. Errors name the path of keys that leads to the value."""

    def __init__(
        self,
        data: memoryview,
        source: str,
        extensions: Collection[int],
        bounds: tuple[int, int] | None = None,
    ) -> None:
        self.data = data
        self.source = source
        self.extensions = extensions
        self.position, self.end = bounds or (0, len(data))
        self.values = 0
        self.text_bytes = 0

    @property
    def left(self) -> int:
        return self.end - self.position

    def error(self, path: tuple[str, ...], problem: str) -> CheckpointError:
        where = quoted("/".join(path)) if path else "the outermost value"
        return CheckpointError(f"{self.source}: {where} {problem}")

    def take(self, count: int, path: tuple[str, ...]) -> memoryview:
        if count > self.left:
            raise self.error(
                path, f"needs {count} bytes, and {self.left} are left (an incomplete download?)"
            )
        begin, self.position = self.position, self.position + count
        return self.data[begin : self.position]

    def header(self, path: tuple[str, ...]) -> tuple[str, Any]:
        """The kind of the next value, and the number itself or the length of what follows."""
        code = self.take(1, path)[0]
        if code < 0x80:
            return "int", code
        if code < 0xC0:
            kind, bits = ("str", 5) if code >= 0xA0 else ("list", 4) if code >= 0x90 else ("map", 4)
            return kind, code & ((1 << bits) - 1)
        if code >= 0xE0:
            return "int", code - 0x100
        if code not in _KINDS:
            raise self.error(path, f"begins with the byte {code:#x}, which msgpack does not use")
        kind, size = _KINDS[code]
        number = self.take(size, path)
        if kind == "fixext":
            return "ext", 1 << (code - 0xD4)
        if kind == "float":
            return kind, struct.unpack(">f" if size == 4 else ">d", number)[0]
        return kind.removeprefix("u"), int.from_bytes(number, "big", signed=kind == "int")

    def value(self, path: tuple[str, ...]) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise self.error(path, f"is beyond the first {MAX_VALUES} values; no more are read")
        kind, number = self.header(path)
        match kind:
            case "nil":
                return None
            case "false" | "true":
                return kind == "true"
            case "int" | "float":
                return number
            case "str":
                return self.text(number, path)
            case "bin":
                return bytes(self.counted(number, path))
            case "ext":
                return self.extension(number, path)
            case _:
                return self.nested(kind, number, path)

    def counted(self, length: int, path: tuple[str, ...]) -> memoryview:
        """The bytes of a text or a binary value, which are limited together."""
        self.text_bytes += length
        if self.text_bytes > MAX_TEXT_BYTES:
            raise self.error(path, f"is beyond {MAX_TEXT_BYTES} bytes of texts; no more are read")
        return self.take(length, path)

    def text(self, length: int, path: tuple[str, ...]) -> str:
        try:
            return str(self.counted(length, path), "utf-8")
        except UnicodeDecodeError as failure:
            raise self.error(path, f"holds text that is not UTF-8 ({failure.reason})") from None

    def nested(self, kind: str, count: int, path: tuple[str, ...]) -> Any:
        """The entries of a map or the items of a list."""
        if len(path) >= MAX_DEPTH:
            raise self.error(path, f"is nested deeper than {MAX_DEPTH} levels")
        least = count * (2 if kind == "map" else 1)  # bytes
        if least > self.left:
            raise self.error(
                path,
                f"is a {kind} of {count} entries, for which the {self.left} bytes that are left "
                "are too few (an incomplete download?)",
            )
        if kind == "list":
            return [self.value((*path, str(number))) for number in range(count)]
        entries: dict[str, Any] = {}
        for _ in range(count):
            kind, length = self.header(path)
            if kind != "str" or length > MAX_KEY_BYTES:
                raise self.error(
                    path, f"has a key that is no text of at most {MAX_KEY_BYTES} bytes"
                )
            key = self.text(length, path)
            if key in entries:
                raise self.error((*path, key), "appears twice")
            entries[key] = self.value((*path, key))
        return self.joined(entries, path) if _CHUNKED in entries else entries

    def extension(self, length: int, path: tuple[str, ...]) -> StoredArray:
        code = int.from_bytes(self.take(1, path), "big", signed=True)
        if code not in self.extensions:
            name = {COMPLEX: ", a complex number", SCALAR: ", a NumPy scalar"}.get(code, "")
            raise self.error(
                path, f"is a msgpack extension of type {code}{name}; only arrays, type 1, are read"
            )
        begin = self.position
        self.take(length, path)
        return _Reader(self.data, self.source, (), (begin, self.position)).array(path)

    def array(self, path: tuple[str, ...]) -> StoredArray:
        """The array that all of the reader's bytes hold."""
        if self.header(path) != ("list", 3):
            raise self.error(path, "is no array of Flax's: expected a shape, a dtype and data")
        kind, count = self.header(path)
        if kind != "list" or count > _MAX_DIMS:
            raise self.error(path, f"must have a shape of at most {_MAX_DIMS} sizes")
        sizes = [self.header(path) for _ in range(count)]
        if any(kind != "int" or size < 0 for kind, size in sizes):
            raise self.error(path, "has a shape with something else than non-negative integers")
        shape = tuple(int(size) for _, size in sizes)
        kind, length = self.header(path)
        name = self.text(length, path) if kind == "str" and length <= MAX_KEY_BYTES else None
        if name not in _DTYPES:
            raise self.error(
                path, f"has the dtype {quoted(name)}; jaxllm reads {', '.join(_DTYPES)}"
            )
        dtype = _DTYPES[name]
        kind, nbytes = self.header(path)
        if kind != "bin" or nbytes != self.left:
            raise self.error(
                path,
                f"is an array whose lengths do not agree: it has {self.left} bytes of data, and "
                f"announces {nbytes if kind == 'bin' else f'a value of kind {kind}'}",
            )
        self.check_size(shape, dtype, nbytes, path)
        return StoredArray(shape, dtype, self.position, self.end, ((self.position, self.end),))

    def check_size(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int, path: tuple[str, ...]
    ) -> None:
        # numpy multiplies the other dimensions of an empty array too, and must not overflow.
        too_large = math.prod(size for size in shape if size) * dtype.itemsize >= 2**63
        if too_large or math.prod(shape) * dtype.itemsize != nbytes:
            raise self.error(
                path, f"is {dtype.name} of shape {quoted(shape)}, which {nbytes} bytes do not fill"
            )

    def joined(self, entries: Mapping[str, Any], path: tuple[str, ...]) -> StoredArray:
        """The array that a map of chunks stands for."""
        shape, chunks = (_in_order(entries.get(part)) for part in ("shape", "chunks"))
        is_shape = shape and len(shape) <= _MAX_DIMS
        is_shape = is_shape and all(type(size) is int and size > 0 for size in shape or ())
        if len(entries) != 3 or entries[_CHUNKED] is not True or not is_shape or not chunks:
            raise self.error(path, "is an array in chunks without a valid shape or chunks")
        first = chunks[0]
        for number, chunk in enumerate(chunks):
            if not isinstance(chunk, StoredArray) or len(chunk.shape) != 1:
                raise self.error((*path, "chunks", str(number)), "is not a flat array")
            if chunk.dtype != first.dtype:
                raise self.error(
                    (*path, "chunks", str(number)),
                    f"is {chunk.dtype.name}, and chunk 0 is {first.dtype.name}",
                )
        pieces = tuple(piece for chunk in chunks for piece in chunk.pieces)
        begin, end = min(begin for begin, _ in pieces), max(end for _, end in pieces)
        array = StoredArray(tuple(shape or ()), first.dtype, begin, end, pieces)
        self.check_size(array.shape, array.dtype, array.nbytes, path)
        return array


def _in_order(numbered: object) -> list[Any] | None:
    """The values of a map with the keys "0", "1", ... by number; None for anything else."""
    if not isinstance(numbered, dict):
        return None
    keys = [str(number) for number in range(len(numbered))]
    return [numbered[key] for key in keys] if numbered.keys() == set(keys) else None
