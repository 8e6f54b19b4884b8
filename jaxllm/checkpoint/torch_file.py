"""Reads ``pytorch_model.bin``, the state dicts that ``torch.save`` writes, as data.

The file holds the storages of the tensors, and a pickle that describes the tensors as views of
them. The pickle is interpreted, not unpickled (:mod:`jaxllm.checkpoint.pickle_subset`), so a file
cannot run code. Both formats of torch are read:

* a zip file (torch 1.6 and newer) with the members ``data.pkl``, ``byteorder`` and a member
  ``data/KEY`` for each storage, all of them stored without compression;
* the older format: five pickles one after another (a magic number, a protocol version, facts about
  the machine, the state dict, the list of storage keys), and then, for each key, the number of
  elements as a 64-bit integer and the elements. Numbers are little-endian on every machine.

Tensors are views of a read-only memory map, with any strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.pickle_subset import (
    MAX_PICKLE_BYTES,
    UNTYPED,
    Storage,
    View,
    read_pickle,
)
from jaxllm.checkpoint.safetensors import DTYPES
from jaxllm.checkpoint.source import ROOM, Index, MappedFile, StoredTensor, find_tensor
from jaxllm.checkpoint.zip_members import zip_members
from jaxllm.common.errors import CheckpointError, UnsupportedError, listed, quoted, warn

_ZIP = b"PK\3\4"
_MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # the number 0x1950a86a20f9469cfc6c
_PROTOCOL = bytes.fromhex("80024de9032e")  # 1001
_TAR = slice(257, 262), b"ustar"
_WRAPPERS = ("state_dict", "model")
_PARALLEL = "module."  # before the names of a model in torch's DataParallel

_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}
_STORAGE_BYTES = {
    **{name: dtype.itemsize for name, dtype in _DTYPES.items()},
    **{"complex64": 8, "complex128": 16, UNTYPED: 1},
}
_Storages = dict[str, tuple[int, int]]
"""Where the bytes of each storage begin and end, by the storage's key."""


@dataclass(frozen=True)
class StridedTensor(StoredTensor):
    """A tensor as a view of the file's bytes from `begin` to `end`, with strides in bytes."""

    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TorchFile(MappedFile):
    """One ``.bin`` file; opening it interprets and checks its pickle, and reads no tensor.

    Tensors have the names of the state dict. A state dict that is wrapped in a dict of a training
    script (``state_dict`` or ``model``), or whose names begin with ``module.``, is unwrapped, and a
    warning says so.

    Raises:
        CheckpointError: the file is damaged, or holds no state dict.
        UnsupportedError: its pickle uses names beyond those of state dicts, a tensor has a dtype
            such as float8, or the file is one of TorchScript or an archive.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        super().__init__(Path(path))
        self.repeated_bytes = self.size
        self._is_big_endian = False
        start = bytes(self.head(512))
        if start.startswith(_ZIP):
            value, storages = self._read_zip()
        elif start.startswith(_MAGIC):
            value, storages = self._read_legacy()
        elif start[_TAR[0]] == _TAR[1]:
            raise UnsupportedError(
                f"{self.path}: a tar file, of torch 0.1; load and save it with a newer torch"
            )
        else:
            raise CheckpointError(f"{self.path}: not a file that torch.save wrote")
        self.tensors = {
            name: self._tensor(name, view, *storages[view.storage.key])
            for name, view in self._state_dict(value).items()
        }
        self._check_size()

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Reads a tensor or a slice of it; one of a big-endian file as a copy."""
        entry: StridedTensor = find_tensor(self.tensors, name, self.path)
        if entry.dtype == np.bool_:
            values = self.view(np.dtype(np.uint8), entry.begin, entry.shape, entry.strides)
            if values.max(initial=0) > 1:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)}: a bool is neither 0 nor 1"
                )
        values = self.view(entry.dtype, entry.begin, entry.shape, entry.strides)
        values = values[index] if index else values
        if not self._is_big_endian:
            return values
        return values.view(f"u{entry.dtype.itemsize}").byteswap().view(entry.dtype)

    def _read_zip(self) -> tuple[Any, _Storages]:
        source, data = str(self.path), self.head(self.size)
        members = zip_members(data, source)
        pickles = [name for name in members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{source}: the zip file has {len(pickles)} members data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if any(name.startswith((f"{folder}constants.pkl", f"{folder}code/")) for name in members):
            raise UnsupportedError(
                f"{source}: a TorchScript program, not a state dict; save model.state_dict()"
            )
        begin, end = members[pickles[0]]
        value, named, length = self._interpret(begin, end)
        if length != end - begin:
            raise CheckpointError(f"{source}: {end - begin - length} bytes follow the pickle")
        begin, end = members.get(f"{folder}byteorder", (0, 0))
        order = bytes(data[begin : min(end, begin + 16)]) or b"little"
        if order not in (b"little", b"big"):
            raise CheckpointError(f"{source}: byteorder is {quoted(str(order))}")
        storages: _Storages = {}
        for key, storage in named.items():
            where = f"{source}: the storage {quoted(key)}"
            if f"{folder}data/{key}" not in members:
                raise CheckpointError(f"{where} is missing: the zip file has no member data/{key}")
            begin, end = storages[key] = members[f"{folder}data/{key}"]
            if end - begin != storage.count * _STORAGE_BYTES[storage.dtype]:
                raise CheckpointError(
                    f"{where} has {end - begin} bytes, which are not {storage.count} elements of "
                    f"{storage.dtype}"
                )
        self._is_big_endian = order == b"big"
        return value, storages

    def _read_legacy(self) -> tuple[Any, _Storages]:
        source, data = str(self.path), self.head(self.size)
        position = len(_MAGIC) + len(_PROTOCOL)
        if data[len(_MAGIC) : position] != _PROTOCOL:
            raise CheckpointError(f"{source}: not version 1001 of torch's format before zip files")
        _, _, length = self._interpret(position, self.size)  # facts about the machine
        position += length
        value, named, length = self._interpret(position, self.size)
        position += length
        keys, _, length = self._interpret(position, self.size)
        position += length
        if type(keys) is not list or not all(type(key) is str for key in keys):
            raise CheckpointError(f"{source}: the list of storages is not a list of texts")
        if len(keys) != len(named) or set(keys) != named.keys():
            raise CheckpointError(
                f"{source}: the list of storages has other keys than the tensors use: "
                + listed(sorted(named.keys() ^ set(keys)) or ["one twice"])
            )
        storages: _Storages = {}
        for key in keys:
            storage = named[key]
            count = int.from_bytes(data[position : position + 8], "little", signed=True)
            begin = position + 8
            position = begin + storage.count * _STORAGE_BYTES[storage.dtype]
            if position > self.size:
                raise CheckpointError(
                    f"{source}: the storage {quoted(key)} ends at byte {position} of a file of "
                    f"{self.size} (an incomplete download?)"
                )
            if count != storage.count:
                raise CheckpointError(
                    f"{source}: the storage {quoted(key)} has {count} elements, and its tensors "
                    f"say {storage.count}"
                )
            storages[key] = begin, position
        if position != self.size:
            raise CheckpointError(f"{source}: {self.size - position} bytes follow the last storage")
        return value, storages

    def _interpret(self, begin: int, end: int) -> tuple[Any, dict[str, Storage], int]:
        """The value of the pickle between two bytes, the storages it names, and its length."""
        data = self.head(self.size)[begin : min(end, begin + MAX_PICKLE_BYTES)]
        storages: dict[str, Storage] = {}
        value, length = read_pickle(bytes(data), str(self.path), storages)
        return value, storages, length

    def _state_dict(self, value: Any) -> dict[str, View]:
        """The tensors by name, without the wrapper of a training script."""
        if type(value) is not dict:
            raise CheckpointError(
                f"{self.path}: holds a value of type {type(value).__name__}, not a state dict"
            )
        told: list[str] = []
        inner = [key for key in _WRAPPERS if type(value.get(key)) is dict]
        if inner:
            if len(inner) > 1:
                raise CheckpointError(
                    f"{self.path}: holds both {' and '.join(inner)}; save one of them alone"
                )
            told = [f"the weights are those under {quoted(inner[0])}"]
            if others := [quoted(key) for key in value if key != inner[0]]:
                told.append(f"{listed(others)} beside them are not read")
            value = value[inner[0]]
        for name, view in value.items():
            if type(view) is not View:
                raise CheckpointError(
                    f"{self.path}: {quoted(name)} is a value of type {type(view).__name__}, not a "
                    "tensor; save model.state_dict() alone"
                )
        if value and all(name.startswith(_PARALLEL) for name in value):
            told.append(f"{_PARALLEL!r} is removed from the names")
            value = {name.removeprefix(_PARALLEL): view for name, view in value.items()}
        if told:
            warn(f"{self.path}: {', and '.join(told)}")
        return value

    def _tensor(self, name: str, view: View, begin: int, end: int) -> StridedTensor:
        """The tensor that is a view of a storage, whose bytes begin and end there."""
        where = f"{self.path}: tensor {quoted(name)}"
        if view.dtype not in _DTYPES:
            raise UnsupportedError(
                f"{where} has dtype {view.dtype}, which jaxllm does not read: convert it to "
                "bfloat16 first"
            )
        dtype = _DTYPES[view.dtype]
        is_empty = 0 in view.shape
        last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True) if n > 1)
        first = begin + view.offset * dtype.itemsize
        stop = first if is_empty else first + (last + 1) * dtype.itemsize
        if stop > end:
            raise CheckpointError(
                f"{where} with offset {view.offset}, shape {quoted(list(view.shape))} and strides "
                f"{quoted(list(view.strides))} does not lie within its storage of "
                f"{view.storage.count} elements"
            )
        # numpy multiplies the other dimensions of an empty array too, and must not overflow.
        if math.prod(size for size in view.shape if size) * dtype.itemsize >= 2**63:
            raise CheckpointError(f"{where}: shape {quoted(list(view.shape))} is too large")
        strides = tuple(
            stride * dtype.itemsize if size > 1 and not is_empty else dtype.itemsize
            for size, stride in zip(view.shape, view.strides, strict=True)
        )
        return StridedTensor(view.shape, dtype, first, stop, strides)

    def _check_size(self) -> None:
        """Raises CheckpointError if the tensors have many more bytes than the file.

        Tensors that are the same view count once.
        """
        total, previous = 0, None
        # Sorted, since numbers of a file can be made to collide in a set.
        for entry in sorted(self.tensors.values(), key=lambda x: (x.begin, x.shape, x.strides)):
            view = entry.begin, entry.shape, entry.strides
            total += 0 if view == previous else entry.nbytes
            previous = view
        if total > 2 * self.size + ROOM:
            raise CheckpointError(
                f"{self.path}: its tensors have {total} bytes together, and the file has "
                f"{self.size}; at most twice the file and {ROOM} bytes are read"
            )
