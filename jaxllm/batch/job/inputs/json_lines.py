"""Rows of JSONL files."""

from __future__ import annotations

import contextlib
import hashlib
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
        lines = enumerate(data.removeprefix(_BOM).split(b"\n"), start=1)
        self._lines = [(number, line) for number, line in lines if line.strip()]

    def __len__(self) -> int:
        return len(self._lines)

    def number(self, index: int) -> int:
        return self._lines[index][0]

    def read(self, index: int) -> Mapping[str, Any]:
        raw = self._parsed(index)
        if not self.choice.named:
            return raw
        try:
            return self.choice.apply(raw)
        except DataError as error:
            raise DataError(f"line {self.number(index)}: {error}") from None

    def _parsed(self, index: int) -> Mapping[str, Any]:
        number, line = self._lines[index]
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
