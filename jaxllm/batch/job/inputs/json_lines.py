"""Rows of JSONL files."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Mapping
from typing import Any

from jaxllm.batch.job.inputs.columns import ColumnChoice, MissingCellError
from jaxllm.batch.job.inputs.content import MAX_ROW_BYTES, check_row_count
from jaxllm.batch.job.inputs.source import Source
from jaxllm.common.errors import DataError, JaxLLMError
from jaxllm.common.strict_json import parse_json

BOM = b"\xef\xbb\xbf"


class JsonLines(Source):
    """One JSON object per line; blank lines do not count."""

    def __init__(self, name: str, data: bytes, choice: ColumnChoice) -> None:
        super().__init__(name, hashlib.sha256(data).hexdigest(), choice)
        self._data = data
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

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, index: int) -> int:
        return self._numbers[index]

    def read(self, index: int) -> Mapping[str, Any]:
        raw = self._parsed(index)
        if not self.choice.named:
            return raw
        try:
            return self.choice.apply(raw)
        except MissingCellError as error:
            raise MissingCellError(f"line {self.number(index)}: {error}", error.row_id) from None

    def _parsed(self, index: int) -> Mapping[str, Any]:
        number, start, stop = self.number(index), self._starts[index], self._stops[index]
        if stop - start > MAX_ROW_BYTES:
            raise DataError(
                f"line {number}: has {stop - start} bytes, and a row at most {MAX_ROW_BYTES}"
            )
        raw = parse_json(self._data[start:stop], source=f"line {number}", error=DataError)
        if not isinstance(raw, Mapping):
            raise DataError(f"line {number}: is {type(raw).__name__}, not an object")
        return raw

    def first_object(self) -> Mapping[str, Any]:
        """The first line that is an object; empty if none is."""
        for index in range(len(self)):
            with contextlib.suppress(JaxLLMError):
                return self._parsed(index)
        return {}

    def unread_keys(self) -> list[str]:
        if not self.choice.named:
            return []
        keys: dict[str, None] = {}
        for index in range(len(self)):
            with contextlib.suppress(JaxLLMError):
                raw = self._parsed(index)
                keys.update(dict.fromkeys(name for name in raw if not self.choice.reads(name)))
        return list(keys)


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
