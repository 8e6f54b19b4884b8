"""Interprets the pickles of PyTorch's state dicts, without unpickling anything.

A pickle is a program that can import and call any function. `read_pickle` knows only the
operations that occur in state dicts. The result is made of dicts, lists, tuples, texts, numbers and
records of tensors. A name in the pickle is compared with a fixed list of texts: nothing is
imported, called or instantiated, whatever the file says.

The number of operations, the bytes of a pickle, and every text and number in it are bounded, and no
value is walked, hashed or printed while it may be nested.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from jaxllm.common.errors import CheckpointError, UnsupportedError, quoted

MAX_OPERATIONS = 2_000_000  # the pickle of 20,000 tensors has 600,000 operations
MAX_PICKLE_BYTES = 16 << 20  # the pickle of 20,000 tensors has 2.7 MB
_MAX_NAME_BYTES = 255  # of a module and a function
_MAX_NUMBER_BYTES = 8

UNTYPED = "bytes"
_STORAGES = {
    **{"torch.FloatStorage": "float32", "torch.HalfStorage": "float16"},
    **{"torch.BFloat16Storage": "bfloat16", "torch.DoubleStorage": "float64"},
    **{"torch.LongStorage": "int64", "torch.IntStorage": "int32", "torch.ShortStorage": "int16"},
    **{"torch.CharStorage": "int8", "torch.ByteStorage": "uint8", "torch.BoolStorage": "bool"},
    **{"torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128"},
    "torch.storage.UntypedStorage": UNTYPED,
}
_DTYPES = {
    f"torch.{name}": name
    for name in (
        *("uint16", "uint32", "uint64", "complex32", "float4_e2m1fn_x2", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
_ORDERED_DICT = "collections.OrderedDict"
_TENSOR, _TENSOR_WITH_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
GLOBALS = {*_STORAGES, *_DTYPES, _ORDERED_DICT, _TENSOR, _TENSOR_WITH_DTYPE, _PARAMETER}
"""The names that a pickle may use."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name of `GLOBALS`. It stands for itself; nothing of this name is looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The memory of one or several tensors: its key in the file, dtype and number of elements."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: a view of a storage. Offset and strides count elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_pickle(data: bytes, source: str, storages: dict[str, Storage]) -> tuple[Any, int]:
    """Interprets the pickle at the start of some bytes.

    Args:
        data: at least the bytes of the pickle.
        source: the file's name, for errors.
        storages: receives the storages that the pickle names, by key.

    Returns:
        The value (None, bool, int, float, str, list, tuple, dict, or a record of this module), and
        the number of bytes of the pickle. Integers as keys of dicts become texts.

    Raises:
        CheckpointError: the pickle is damaged, too large, or does something else than state dicts.
        UnsupportedError: it uses a name beyond `GLOBALS`.

    >>> read_pickle(b"\\x80\\x02}X\\x01\\x00\\x00\\x00aK\\x07s.", "example", {})
    ({'a': 7}, 13)
    """
    machine = _Machine(data, source, storages)
    for _ in range(MAX_OPERATIONS):
        code = machine.take(1)[0]
        if code == _STOP:
            if machine.frames or len(machine.stack) != 1:
                machine.fail("it ends before its value is complete")
            return machine.stack[0], machine.position
        if code not in _OPERATIONS:
            machine.fail(f"the operation {code:#04x} does not occur in pickles of state dicts")
        _OPERATIONS[code](machine)
    machine.fail(f"it has more than {MAX_OPERATIONS:,} operations")


class _Machine:
    """The stack of a pickle's values. A mark begins a new stack, and `frames` has the others."""

    def __init__(self, data: bytes, source: str, storages: dict[str, Storage]) -> None:
        self.data = data
        self.source = source
        self.storages = storages
        self.position = 0
        self.stack: list[Any] = []
        self.frames: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def fail(self, problem: str, error: type[Exception] = CheckpointError) -> NoReturn:
        """Raises an error that names the file, the tensor if one is begun, and the byte."""
        where = next(filter(None, map(_open_key, [*self.frames, self.stack])), "")
        raise error(
            f"{self.source}:{where} cannot be read as a state dict: {problem} (byte "
            f"{self.position} of the pickle)"
        )

    def take(self, count: int) -> bytes:
        begin, self.position = self.position, self.position + count
        if self.position > len(self.data):
            self.position = begin
            self.fail(f"{count} bytes are needed, and {len(self.data) - begin} are left")
        return self.data[begin : self.position]

    def line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + _MAX_NAME_BYTES + 1)
        if end < 0:
            self.fail(f"a name has no end within {_MAX_NAME_BYTES} bytes")
        line = self.take(end + 1 - self.position)[:-1]
        return line.decode("ascii", "backslashreplace")

    def number(self, count: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "little", signed=signed)

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack:
            self.fail("a value is missing")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack:
            self.fail("a value is missing")
        return self.stack[-1]

    def pop_frame(self) -> list[Any]:
        """The values since the last mark."""
        if not self.frames:
            self.fail("a mark is missing")
        values, self.stack = self.stack, self.frames.pop()
        return values

    # Operations.

    def protocol(self) -> None:
        version = self.number(1)
        if version not in (2, 3):
            self.fail(
                f"it has the pickle protocol {version}; save it again with torch.save's default",
                UnsupportedError,
            )

    def mark(self) -> None:
        self.frames.append(self.stack)
        self.stack = []

    def text(self) -> None:
        try:
            self.push(self.take(self.number(4)).decode())
        except UnicodeDecodeError:
            self.fail("a text is not UTF-8")

    def long_number(self) -> None:
        count = self.number(1)
        if count > _MAX_NUMBER_BYTES:
            self.fail(f"a number has {count} bytes; at most {_MAX_NUMBER_BYTES} are read")
        self.push(self.number(count, signed=True))

    def put(self, count: int) -> None:
        index = self.number(count)
        if index > MAX_OPERATIONS:
            self.fail(f"{index} is too large an index of the memo")
        self.memo[index] = self.top()

    def get(self, count: int) -> None:
        index = self.number(count)
        if index not in self.memo:
            self.fail(f"the memo has no value {index}")
        self.push(self.memo[index])

    def join(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            self.fail("an item is appended to something else than a list")
        target += values

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not dict or len(values) % 2:
            self.fail("an item is set in something else than a dict, or without a value")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int):
                self.fail(f"a key of a dict is of type {type(key).__name__}, not a text")
            name = str(key)  # texts cannot be made to collide in a dict, as integers can
            if name in target:
                self.fail(f"the name {quoted(name)} is set twice")
            target[name] = value

    def build(self) -> None:
        """Drops the state of a module's state dict, which is metadata."""
        state = self.pop()
        if type(self.top()) is not dict or type(state) is not dict:
            self.fail("a state is set of something else than a dict")

    def find_global(self) -> None:
        name = f"{self.line()}.{self.line()}"
        if name not in GLOBALS:
            self.fail(
                f"it uses {quoted(name)}, and state dicts consist of tensors, texts and numbers "
                "only; save the state dict of the model alone, or convert the file to safetensors "
                "where you trust it",
                UnsupportedError,
            )
        self.push(Global(name))

    def find_storage(self) -> None:
        values = self.pop()
        match values:
            case ("storage", Global(name=name), str(key), str(), int(count), *rest):
                is_valid = type(count) is int and count >= 0 and rest in ([], [None])
            case _:
                is_valid = False
                name, key, count = "", "", 0
        if type(values) is not tuple or not is_valid or name not in _STORAGES:
            self.fail("the reference to a storage is not as torch writes it")
        storage = Storage(key, _STORAGES[name], count)
        if self.storages.setdefault(key, storage) != storage:
            self.fail(f"the storage {quoted(key)} has two dtypes or two sizes")
        self.push(self.storages[key])

    def reduce(self) -> None:
        values, function = self.pop(), self.pop()
        if type(function) is not Global or type(values) is not tuple:
            self.fail("a call is not as torch writes it")
        match function.name, values:
            case name, () if name == _ORDERED_DICT:
                return self.push({})
            case name, (View() as view, bool(), dict()) if name == _PARAMETER:
                return self.push(view)
            case name, (Storage() as storage, *rest) if name == _TENSOR:
                dtype = None if storage.dtype == UNTYPED else storage.dtype
            case name, (Storage() as storage, *rest) if name == _TENSOR_WITH_DTYPE:
                dtype = rest.pop(5) if len(rest) > 5 else None
                dtype = _DTYPES.get(dtype.name) if type(dtype) is Global else None
            case _:
                self.fail(f"the arguments of {function.name} are not as torch writes them")
        match rest:
            case [offset, shape, strides, bool(), dict(), *metadata] if len(metadata) < 2:
                sizes_are_valid = _are_sizes((offset,), shape, strides)
            case _:
                return self.fail(f"the arguments of {function.name} are not as torch writes them")
        if dtype is None or not sizes_are_valid or len(shape) != len(strides):
            self.fail(
                "the dtype, offset, shape or strides of a tensor are not as torch writes them"
            )
        self.push(View(storage, dtype, offset, shape, strides))


_MAX_DIMS = 64  # NumPy's own limit, and torch's


def _are_sizes(*values: object) -> TypeGuard[tuple[tuple[int, ...], ...]]:
    return all(
        type(sizes) is tuple
        and len(sizes) <= _MAX_DIMS
        and all(type(size) is int and size >= 0 for size in sizes)
        for sizes in values
    )


def _open_key(stack: list[Any]) -> str | None:
    """The key in a stack whose value is not complete."""
    keys = stack[:-1] if stack and type(stack[-1]) is Global else stack
    return f" {quoted(keys[-1])}" if keys and type(keys[-1]) is str else None


_STOP = ord(".")
_OPERATIONS: Mapping[int, Callable[[_Machine], object]] = {
    0x80: _Machine.protocol,
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    0x8A: _Machine.long_number,
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): _Machine.text,
    ord("q"): lambda m: m.put(1),
    ord("r"): lambda m: m.put(4),
    ord("h"): lambda m: m.get(1),
    ord("j"): lambda m: m.get(4),
    ord(")"): lambda m: m.join(0),
    0x85: lambda m: m.join(1),
    0x86: lambda m: m.join(2),
    0x87: lambda m: m.join(3),
    ord("t"): lambda m: m.push(tuple(m.pop_frame())),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_frame()),
    ord("}"): lambda m: m.push({}),
    ord("s"): lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.pop_frame()),
    ord("c"): _Machine.find_global,
    ord("Q"): _Machine.find_storage,
    ord("R"): _Machine.reduce,
    ord("b"): _Machine.build,
}
"""What each operation does, by its code."""
