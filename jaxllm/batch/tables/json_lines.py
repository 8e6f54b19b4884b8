"""Rows of JSONL files."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from typing import Any

from jaxllm.batch.tables.content import BOM, MAX_ROW_BYTES, check_row_count
from jaxllm.batch.tables.table import Table
from jaxllm.common.errors import DataError, JaxLLMError
from jaxllm.common.files import parse_json


class JsonLines(Table):
    """One JSON object per line; blank lines do not count."""

    unit = "line"

    def __init__(self, name: str, data: bytes) -> None:
        self.name, self._data = name, data
        # Positions, since a file may have millions of short lines.
        self._numbers, self._starts, self._stops = array("Q"), array("Q"), array("Q")
        start = len(BOM) if data.startswith(BOM) else 0
        number = 1
        while (first := first_nonblank(data, start)) is not None:
            number += data.count(b"\n", start, first)
            start = max(start, data.rfind(b"\n", start, first) + 1)
            stop = data.find(b"\n", start)
            stop = len(data) if stop < 0 else stop
            self._numbers.append(number)
            self._starts.append(start)
            self._stops.append(stop)
            check_row_count(name, len(self._numbers))
            number, start = number + 1, stop + 1

    def sha256(self) -> str:
        return hashlib.sha256(self._data).hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, index: int) -> int:
        return self._numbers[index]

    def column_names(self) -> list[str]:
        """The keys of all lines, in the order in which they appear."""
        keys: dict[str, None] = {}
        for index in range(len(self)):
            with contextlib.suppress(JaxLLMError):
                keys.update(dict.fromkeys(self.cells(index)))
        return list(keys)

    def first_keys(self) -> list[str]:
        """The keys of the first line that is an object; none if no line is."""
        for index in range(len(self)):
            with contextlib.suppress(JaxLLMError):
                return list(self.cells(index))
        return []

    def text(self, index: int) -> str:
        line = self._data[self._starts[index] : self._stops[index]]
        return line[:MAX_ROW_BYTES].decode("utf-8", "backslashreplace")

    def cells(self, index: int) -> dict[str, Any]:
        number, start, stop = self.number(index), self._starts[index], self._stops[index]
        if stop - start > MAX_ROW_BYTES:
            raise DataError(
                f"line {number}: has {stop - start} bytes, and a row at most {MAX_ROW_BYTES}"
            )
        raw = parse_json(self._data[start:stop], source=f"line {number}", error=DataError)
        if not isinstance(raw, dict):
            raise DataError(f"line {number}: is {type(raw).__name__}, not an object")
        return raw


def first_nonblank(data: bytes, start: int = 0) -> int | None:
    """Position of the first byte from `start` on that is no white space; None if there is none.

    Looks at blocks, since blank lines may take any number of bytes.

    >>> first_nonblank(b" \\n a"), first_nonblank(b"a ", 1)
    (3, None)
    """
    size = 64
    while block := data[start : start + size]:
        rest = block.lstrip()
        if rest:
            return start + len(block) - len(rest)
        start, size = start + size, min(16 * size, 2**20)
    return None
