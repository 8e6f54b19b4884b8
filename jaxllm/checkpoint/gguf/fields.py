"""Typed access to the metadata fields of a GGUF model; `config.py` says what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.common.errors import CheckpointError, UnsupportedError, listed, quoted


class Fields:
    """Metadata fields of one architecture; tracks reads, so that unknown fields can be rejected."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, source: str) -> None:
        self.source = source
        self.prefix = f"{architecture}."
        self._values = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }
        # The first two describe the file; the vocabulary's size is checked against the tensors.
        self._used = {"tensor_data_layout", "rope.scaling.finetuned", "vocab_size"}

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Reads an integer, required unless there is a default."""
        value = self._required(key, default)
        if type(value) is not int or not minimum <= value < 2**31:
            raise CheckpointError(
                f"{self.source}: {self.prefix}{key} is {quoted(value)}, not an integer of at least "
                f"{minimum}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a positive finite number, required unless there is a default."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(
                f"{self.source}: {self.prefix}{key} is {quoted(value)}, not a positive number"
            )
        return float(value)

    def get(self, key: str, default: Any = None) -> Any:
        """Reads a field of any scalar type, or returns the default."""
        self._used.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list | np.ndarray):
            raise UnsupportedError(
                f"{self.source}: {self.prefix}{key} has a value for each layer; jaxllm's models "
                "have the same in all"
            )
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Raises UnsupportedError unless the field is absent or has one of the `allowed` values."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedError(
                f"{self.source}: {self.prefix}{key} is {quoted(value)}; jaxllm implements "
                f"{' or '.join(map(str, allowed))} only"
            )

    def refuse_unused(self) -> None:
        """Raises UnsupportedError naming the fields that were not read, if any."""
        unused = sorted(self._values.keys() - self._used)
        if unused:
            raise UnsupportedError(
                f"{self.source}: jaxllm does not implement "
                + listed([quoted(self.prefix + key) for key in unused])
            )

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.source}: the metadata lacks {self.prefix}{key}")
        return value
