"""Finds the members of a zip file whose bytes lie in it as they are, to map them.

The central directory is read strictly: a member that is compressed or encrypted, has the name or
the bytes of another one, or another header of its own than the directory says, is an error.
Python's ``zipfile`` reads a directory of any size, and compares headers only when it copies a
member.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.common.errors import CheckpointError, UnsupportedError, quoted

MAX_MEMBERS = 1 << 18
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_HEADER = struct.Struct("<4s5H3I2H")
_HAS_DESCRIPTOR = 0x8  # the sizes follow the member, and the header has zeros
_ENCRYPTED = 0x1 | 0x40 | 0x2000
_BIG = 0xFFFFFFFF  # the number is in the extra field of zip64


@dataclass(frozen=True)
class _Entry:
    name: str
    flags: int
    method: int
    stored: int
    size: int
    header: int


def zip_members(data: memoryview, source: str) -> dict[str, tuple[int, int]]:
    """The members of a zip file, by name: where their bytes begin and end.

    Args:
        data: the whole file.
        source: the file's name, for errors.

    Raises:
        CheckpointError: the file is damaged or contradicts itself.
        UnsupportedError: a member is compressed or encrypted.
    """
    start, size, count = _directory(data, source)
    members: dict[str, tuple[int, int]] = {}
    ranges: list[tuple[int, int, str]] = []
    for entry in _entries(data[start : start + size], count, source):
        where = f"{source}: member {quoted(entry.name)} of the zip file"
        if entry.flags & _ENCRYPTED:
            raise UnsupportedError(f"{where} is encrypted; extract it and zip it without")
        if entry.method or entry.stored != entry.size:
            raise UnsupportedError(
                f"{where} is compressed, and torch stores its members as they are; zip it again "
                "without compression (zip -0)"
            )
        if entry.name in members:
            raise CheckpointError(f"{where}: two members have this name")
        begin = _data_begin(data, entry, where)
        if begin + entry.size > start:
            raise CheckpointError(f"{where} reaches beyond the bytes before the directory")
        members[entry.name] = begin, begin + entry.size
        ranges.append((entry.header, begin + entry.size, entry.name))
    reached, previous = 0, ""
    for begin, end, name in sorted(ranges):
        if begin < reached:
            raise CheckpointError(
                f"{source}: the members {quoted(previous)} and {quoted(name)} of the zip file "
                "overlap"
            )
        reached, previous = end, name
    return members


def _unpack(form: struct.Struct, data: memoryview, begin: int, magic: bytes) -> tuple[int, ...]:
    """The numbers of a record after its magic bytes; empty if it is not there."""
    if begin < 0 or begin + form.size > len(data) or data[begin : begin + 4] != magic:
        return ()
    return form.unpack_from(data, begin)[1:]


def _directory(data: memoryview, source: str) -> tuple[int, int, int]:
    """Begin, size and number of entries of the central directory."""
    end = len(data) - _END.size
    numbers = _unpack(_END, data, end, b"PK\5\6")
    if not numbers:
        raise CheckpointError(
            f"{source}: the zip file does not end with its directory (an incomplete download?)"
        )
    disk, first_disk, here, count, size, start, _ = numbers
    locator = _unpack(_LOCATOR64, data, end - _LOCATOR64.size, b"PK\6\7")
    if locator:
        end = locator[1]
        numbers = _unpack(_END64, data, end, b"PK\6\6")
        if not numbers or numbers[0] + 12 != len(data) - _END.size - _LOCATOR64.size - end:
            raise CheckpointError(f"{source}: the zip64 end of the directory is not where it says")
        _, _, _, disk, first_disk, here, count, size, start = numbers
    if disk or first_disk or here != count or start + size != end:
        raise CheckpointError(f"{source}: the zip file's directory is not where its end says")
    if count > MAX_MEMBERS:
        raise CheckpointError(
            f"{source}: the zip file has {count} members; at most {MAX_MEMBERS} are read"
        )
    return start, size, count


def _entries(data: memoryview, count: int, source: str) -> Iterator[_Entry]:
    position = 0
    for number in range(count):
        numbers = _unpack(_ENTRY, data, position, b"PK\1\2")
        position += _ENTRY.size
        lengths = numbers[9:12]
        if not numbers or position + sum(lengths) > len(data):
            raise CheckpointError(f"{source}: entry {number} of the zip file's directory is cut")
        name = bytes(data[position : position + lengths[0]]).decode("utf-8", "backslashreplace")
        position += lengths[0]
        extra = bytes(data[position : position + lengths[1]])
        position += lengths[1] + lengths[2]
        sizes = _sizes(extra, [numbers[8], numbers[7], numbers[15]])
        if sizes is None or numbers[12]:
            raise CheckpointError(
                f"{source}: member {quoted(name)} of the zip file has a directory entry that is "
                "damaged"
            )
        yield _Entry(name, numbers[2], numbers[3], sizes[1], sizes[0], sizes[2])
    if position != len(data):
        raise CheckpointError(f"{source}: the zip file's directory has more than {count} entries")


def _sizes(extra: bytes, sizes: list[int]) -> list[int] | None:
    """The size, the stored size and the header's offset, with those of zip64; None if they lack."""
    wanted = [i for i, size in enumerate(sizes) if size == _BIG]
    position = 0
    while wanted and position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        field = extra[position + 4 : position + 4 + length]
        if kind == 1 and len(field) >= 8 * len(wanted):
            for i, index in enumerate(wanted):
                sizes[index] = int.from_bytes(field[8 * i : 8 * i + 8], "little")
            return sizes
        position += 4 + length
    return None if wanted else sizes


def _data_begin(data: memoryview, entry: _Entry, where: str) -> int:
    """Where a member's bytes begin, after its own header, which must agree with the directory."""
    numbers = _unpack(_HEADER, data, entry.header, b"PK\3\4")
    if not numbers:
        raise CheckpointError(f"{where} has no header at byte {entry.header}")
    _, flags, method, _, _, _, stored, size, name_bytes, extra_bytes = numbers
    begin = entry.header + _HEADER.size
    name = bytes(data[begin : begin + name_bytes]).decode("utf-8", "backslashreplace")
    known = (0, _BIG) if flags & _HAS_DESCRIPTOR else (_BIG,)
    sizes_agree = stored in (entry.stored, *known) and size in (entry.size, *known)
    if (name, flags, method) != (entry.name, entry.flags, entry.method) or not sizes_agree:
        raise CheckpointError(f"{where} has another header than the directory says")
    return begin + name_bytes + extra_bytes
