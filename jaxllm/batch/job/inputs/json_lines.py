"""Rows of JSONL files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from array import array
from collections.abc import Mapping
from typing import Any

from jaxllm.batch.job.inputs.columns import ColumnChoice
from jaxllm.batch.job.inputs.source import Source
from jaxllm.common.errors import DataError, JaxLLMError
from jaxllm.common.strict_json import parse_json

_BOM = b"\xef\xbb\xbf"


class JsonLines(Source):
    """One JSON object per line; blank lines do not count."""

    def __init__(self, name: str, data: bytes, choice: ColumnChoice) -> None:
        super().__init__(name, hashlib.sha256(data).hexdigest(), choice)
        self._data = data
        # Positions, since a file may have millions of short lines.
        self._numbers, self._starts, self._stops = array("Q"), array("Q"), array("Q")
        start = len(_BOM) if data.startswith(_BOM) else 0
        for number in itertools.count(1):
            stop = data.find(b"\n", start)
            stop = len(data) if stop < 0 else stop
            if data[start:stop].strip():
                self._numbers.append(number)
                self._starts.append(start)
                self._stops.append(stop)
            start = stop + 1
            if start > len(data):
                break

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
        except DataError as error:
            raise DataError(f"line {self.number(index)}: {error}") from None

    def _parsed(self, index: int) -> Mapping[str, Any]:
        number, line = self.number(index), self._data[self._starts[index] : self._stops[index]]
        raw = parse_json(line, source=f"line {number}", error=DataError)
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
