"""Results of `generate` as Flax's classes give them: beams' output, and the length in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.outputs import ModelOutput

DEFAULT_MAX_LENGTH = 20
"""Columns of a result, prompt included, where neither call nor checkpoint sets a length."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FlaxBeamSearchOutput(ModelOutput):
    """Output of `generate` with beams. Bn: results, `num_return_sequences` for each prompt."""

    sequences: Int[Array | np.ndarray, "Bn L"]
    scores: Float[Array | np.ndarray, " Bn"]
    """Score of each sequence, length penalty included. transformers leaves the penalty out for
    sequences without an end token."""


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
