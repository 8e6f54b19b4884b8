"""Length of the results of `generate`, which Flax's classes give in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.generation.settings.config import GenerationConfig

DEFAULT_MAX_LENGTH = 20
"""Columns of a result, prompt included, where neither call nor checkpoint sets a length."""


def as_dict(config: GenerationConfig | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The fields that a generation config sets."""
    return config.to_dict() if isinstance(config, GenerationConfig) else config or {}


def first_value(name: str, sources: tuple[Mapping[str, Any], ...]) -> Any:
    """The field of the first source that sets it; None: none does."""
    return next((s[name] for s in sources if s.get(name) is not None), None)


def max_length(start: int, sources: tuple[Mapping[str, Any], ...]) -> int | None:
    """Columns of the result of a prompt of `start` columns; None: no length is set."""
    for source in sources:
        if source.get("max_new_tokens") is not None:
            return start + int(source["max_new_tokens"])
        if source.get("max_length") is not None:
            return int(source["max_length"])
    return None
